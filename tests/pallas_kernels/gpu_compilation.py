"""Programs compiled for a GPU that is not there: in a child process, the only one that has JAX's CUDA plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.pallas_kernels.gpu_target import environment

CUDA = Path(__file__).parents[2] / ".cuda"


def compile_in_child(script: str | Path, argument: Any = None, *, timeout_s: float = 600) -> Any:
    """What a script prints as its last line, as JSON; it gets `argument` as JSON, and can import what a test can.

    Skips the test where the plugin is not installed.
    """
    if not (CUDA / ".installed").exists():
        pytest.skip("JAX's CUDA plugin is not in .cuda; `make cuda` installs it")
    command = [sys.executable, str(script), json.dumps(argument)]
    variables = environment(CUDA)
    variables["PYTHONPATH"] += "".join(os.pathsep + path for path in sys.path if path)
    done = subprocess.run(command, env=variables, timeout=timeout_s, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])
