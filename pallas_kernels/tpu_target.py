"""TPUs to compile for where there is none: libtpu holds the whole compiler and needs no chip.

What does not lower, does not fit the chip's memory, or needs a layout that it lacks, fails here as it would there.
"""

import importlib.util
import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

# Topologies by chip and number of devices that we compile for. A v7x chip is two devices, one for each core.
_TOPOLOGIES = {
    "v5e": {1: "v5e:1x1", 4: "v5e:2x2", 8: "v5e:2x4"},
    "v5p": {1: "v5p:1x1x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v6e": {1: "v6e:1x1", 4: "v6e:2x2", 8: "v6e:2x4"},
    "v7x": {2: "tpu7x:1x1x1", 4: "tpu7x:2x1x1", 8: "tpu7x:2x2x1"},
}
CHIPS = tuple(_TOPOLOGIES)
# libtpu asks the machine for these otherwise, and a machine without a TPU has no answer.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
}


def tpu_mesh(chip: str, *, model: int = 1, libtpu: Path | None = None) -> Mesh:
    """A mesh ("data", "model") of described devices, to lower and compile for under `jax.set_mesh`.

    Args:
      chip: one of CHIPS.
      model: devices along "model"; "data" has one.
      libtpu: the shared library; by default $TPU_LIBRARY_PATH, else the installed package libtpu.

    Raises:
      ValueError: no such chip, or not so many devices in one host of it.
      FileNotFoundError: libtpu is not there.
    """
    if chip not in _TOPOLOGIES:
        raise ValueError(f"chip is {chip!r}; choose one of {', '.join(CHIPS)}")
    sizes = [size for size in _TOPOLOGIES[chip] if size >= model]
    if not sizes:
        raise ValueError(f"model is {model}; at most {max(_TOPOLOGIES[chip])} devices of {chip} are described")
    _ensure_libtpu(libtpu)
    topology = topologies.get_topology_desc(_TOPOLOGIES[chip][sizes[0]], "tpu")
    return Mesh(np.array(topology.devices[:model]).reshape(1, model), ("data", "model"))


def _ensure_libtpu(libtpu: Path | None) -> None:
    # A TPU host has real answers. On any other, the library must not be seen before JAX has chosen its backend, else
    # JAX would try to start the TPU that is not there.
    if jax.default_backend() == "tpu":
        return
    path = libtpu or os.environ.get("TPU_LIBRARY_PATH")
    if path is None and (spec := importlib.util.find_spec("libtpu")) is not None and spec.origin is not None:
        path = Path(spec.origin).with_name("libtpu.so")
    if path is None or not Path(path).is_file():
        raise FileNotFoundError(
            f"libtpu is at {path}, which is no file: install the package libtpu, or set TPU_LIBRARY_PATH to libtpu.so"
            if path
            else "libtpu was not found: install the package libtpu, or set TPU_LIBRARY_PATH to libtpu.so"
        )
    for name, value in {**_ENVIRONMENT, "TPU_LIBRARY_PATH": str(path)}.items():
        os.environ.setdefault(name, value)
