"""The scheduler is usable, and quick to import, without JAX."""

import subprocess
import sys


def test_the_scheduler_imports_nothing_beyond_numpy():
    program = (
        "import sys, jaxllm.scheduler\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = {name for name in result.stdout.split() if not name.startswith("_")}
    assert {"jaxllm", "numpy"} <= packages
    assert not packages & {"jax", "jaxlib", "flax", "transformers", "tokenizers", "gguf", "safetensors"}
