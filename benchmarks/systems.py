"""The systems that offline.py compares, and how one is run."""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.errors import ModelNotFoundError
from jaxllm.loading.sources import DEMO_MODELS, demo_file

SCRIPTS = Path(__file__).resolve().parent / "peers"
OURS = "jaxllm"
TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class Peer:
    """environment: the folder of its Python; "{environment}" in a variable stands for its path."""

    script: str
    environment: str
    reads_gguf: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    "llama.cpp": Peer(script="llamacpp_run.py", environment="llamacpp", reads_gguf=True),
    "vllm": Peer(
        script="vllm_run.py",
        environment="vllm",
        variables={
            # As it comes, vLLM keeps a core for its scheduler's process; here one process computes on all cores. The
            # affinity and block time (ms until a waiting thread sleeps) are like those that vLLM gives its workers.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "LD_PRELOAD": "{environment}/lib/libiomp5.so",
            "KMP_AFFINITY": "granularity=fine,compact",
            "KMP_BLOCKTIME": "5",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "transformers": Peer(script="transformers_run.py", environment="vllm"),
}


@dataclass(frozen=True, kw_only=True)
class System:
    name: str
    command: Sequence[str]
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """others: part of the machine's CPU time that was not this run's."""

    exit_status: int
    measurements: list[dict[str, Any]]
    seconds: float
    others: float


def find_systems(model: str, peers: Sequence[str], peers_dir: Path) -> list[System]:
    """Ours and the `peers` that are installed; says which are not."""
    gguf = find_gguf(model)
    command = [sys.executable, str(SCRIPTS / "jaxllm_run.py"), "--model", model]
    systems = [System(name=OURS, command=command, variables={"JAX_PLATFORMS": "cpu"})]
    for name in peers:
        peer = PEERS[name]
        environment = peers_dir / peer.environment
        python = environment / "bin" / "python"
        if not python.exists():
            print(f"{name} is left out: there is no {python}. {SCRIPTS / 'install.sh'} installs it.")
            continue
        weights = gguf if peer.reads_gguf else _safetensors(gguf, python, peers_dir)
        variables = {key: value.format(environment=environment) for key, value in peer.variables.items()}
        command = [str(python), str(SCRIPTS / peer.script), "--model", str(weights)]
        systems.append(System(name=name, command=command, variables=variables))
    return systems


def find_gguf(model: str) -> Path:
    """The file of a demo model, or the file that `model` names."""
    if model not in DEMO_MODELS:
        if not model.endswith(".gguf"):
            raise SystemExit(f"--model {model}: must be a .gguf file or one of {', '.join(DEMO_MODELS)}")
        return Path(model).resolve()
    try:
        return demo_file(model)
    except ModelNotFoundError as error:
        raise SystemExit(f"--model {model}: {error}") from error


def run(system: System, options: Sequence[str], *, cache_dir: Path, log: Path) -> RunResult:
    """Runs one system to its end. Compiled programs persist in `cache_dir`; the standard error goes to `log`."""
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir / "jax"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        "VLLM_CACHE_ROOT": str(cache_dir / "vllm"),
    }
    busy, own, started_at = _machine_cpu_s(), _children_cpu_s(), time.time()
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*system.command, *options, "--started-at", str(started_at)],
            env={**os.environ, **variables, **system.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    seconds = time.time() - started_at
    others_s = (_machine_cpu_s() - busy) - (_children_cpu_s() - own)
    lines = [line for line in output.splitlines() if line.startswith('{"measurement"')]
    return RunResult(
        exit_status=process.returncode,
        measurements=[json.loads(line) for line in lines],
        seconds=seconds,
        others=max(0.0, others_s / (seconds * (os.cpu_count() or 1))),
    )


def _safetensors(gguf: Path, python: Path, peers_dir: Path) -> Path:
    """The folder with the file's weights in bfloat16, made by the peer's `python` when first asked for."""
    folder = peers_dir / "models" / gguf.stem
    if not (folder / "tokenizer.json").exists():
        print(f"Converting {gguf.name} to {folder}", flush=True)
        subprocess.run([python, SCRIPTS / "convert_gguf.py", gguf, folder], check=True)
    return folder


def describe_machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _machine_cpu_s() -> float:
    """Seconds that all cores have been busy since the machine started, or taken by its host."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
