"""The GPU that a kernel is being made for."""

import functools
import logging
import re
from typing import Any

import jax
from jax._src import config as jax_config  # Pallas tells nowhere else whether it interprets.

logger = logging.getLogger(__name__)

NUM_SMS = 132  # Of Hopper in the SXM form, where no device says otherwise.

# What NVIDIA calls its cards of compute capability 9.0: "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA H20".
_HOPPER_NAMES = re.compile(r"\bG?H(20|100|200|800)\b")


def is_hopper() -> bool:
    """Whether the mesh's device, described or real, or else JAX's default device, is a GPU of NVIDIA's Hopper."""
    device = _this_device()
    if device.platform != "gpu":
        return False
    if (capability := getattr(device, "compute_capability", None)) is not None:
        return str(capability) == "9.0"
    return _HOPPER_NAMES.search(device.device_kind) is not None


def require_hopper() -> None:
    """Raises ValueError where the kernels for Hopper would not run: on any other device, unless Pallas interprets."""
    if not is_hopper() and jax_config.pallas_tpu_interpret_mode_context_manager.value is None:
        raise ValueError(
            f"implementation 'gpu' needs a GPU of NVIDIA's Hopper generation (compute capability 9.0, such as an H100 "
            f"or H200), and this is {name()}: take 'xla', or leave the choice to the default"
        )


def name() -> str:
    """Of the device, for people: "Tesla T4 (compute capability 7.5)", "cpu"."""
    device = _this_device()
    capability = getattr(device, "compute_capability", None)
    return device.device_kind if capability is None else f"{device.device_kind} (compute capability {capability})"


def num_sms() -> int:
    """Multiprocessors of the mesh's device, described or real, or else of JAX's default device."""
    device = _this_device()
    return getattr(device, "core_count", None) or getattr(device, "num_cores", None) or NUM_SMS


@functools.cache
def say_that_xla_runs(reason: str) -> None:
    """One line in the log for each reason, in the life of the process."""
    logger.warning("attention is left to XLA instead of the kernel for Hopper GPUs: %s", reason)


def _this_device() -> Any:
    # A mesh's device is described by its name. If it is of the default device's kind, that one can tell more.
    described = jax.sharding.get_abstract_mesh().abstract_device
    device = jax.devices()[0]
    return device if described is None or described.device_kind == device.device_kind else described
