"""What a GPU reaches where nothing is in its way: bytes of a large copy, FLOP/s of a large product in bfloat16.

    python -m benchmarks.gpu.machine

prints them, with what the machine is, as a JSON object. Attention is measured against these figures of the same run.
"""

import importlib.metadata
import json
import subprocess
import sys
from statistics import median
from typing import Any

COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192
PRODUCTS = 8  # In a program, each of the result of the one before.
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def describe() -> dict[str, Any]:
    """The device and the versions; measures nothing."""
    others = _nvidia_smi("pid,process_name", query="compute-apps")  # Before JAX makes this process one of them.

    import jax

    from benchmarks.gpu.timing import engine_options

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "memory_bytes": limit,
        "compiler_options": engine_options(device),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "card": _nvidia_smi("driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"),
        "others_on_it": others,
    }


def copy_rate(num_bytes: int = COPY_BYTES) -> float:
    """Bytes/s, read and written ones together, of the faster of two: the driver's copy, and XLA's with an addition."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.timing import time_launches

    x = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    seconds = []
    for copy in (jax.jit(jnp.copy), jax.jit(lambda x: x + 1)):
        seconds.append(median(time_launches(lambda _, copy=copy: copy(x))))  # type: ignore[misc]
    return 2 * x.nbytes / min(seconds)


def product_rate(size: int = PRODUCT_SIZE) -> float:
    """FLOP/s of products of square matrices of random numbers: with zeros, the card would draw less and run faster."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from benchmarks.gpu.timing import time_launches

    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    b = b * size**-0.5  # So that a product has the size of what goes in.
    multiply = jax.jit(lambda a, b: lax.fori_loop(0, PRODUCTS, lambda _, a: a @ b, a))
    return 2 * size**3 * PRODUCTS / median(time_launches(lambda _: multiply(a, b)))


def run(job: dict[str, Any]) -> dict[str, Any]:
    found = describe()
    if found["platform"] == "gpu":
        found |= {"copy_bytes_per_s": copy_rate(), "product_flops_per_s": product_rate()}
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi(fields: str, *, query: str = "gpu") -> str | None:
    command = ["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(run({}), indent=1))
    else:
        from benchmarks.gpu.jobs import serve

        serve(run, sys.argv[1])
