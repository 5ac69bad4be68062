"""The chip that a kernel is being made for."""

from jax.experimental.pallas import tpu as pltpu

# What is simulated on a CPU, unless the mesh describes a chip.
SIMULATED_VMEM_BYTES = 64 << 20


def this_chip() -> pltpu.TpuInfo | None:
    """What JAX knows of the mesh's TPU, described or real, or of the default device; None where there is no TPU."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:  # A CPU that simulates a TPU.
        return None


def name() -> str | None:
    """As in `tpu_target.CHIPS` for those that we compile for: "v5e"; None where there is no TPU."""
    chip = this_chip()
    return None if chip is None else f"v{str(chip.chip_version).removeprefix('v')}"


def num_cores() -> int:
    """Cores that share the memory of a device: two on v5p, where a program runs on both."""
    chip = this_chip()
    return 1 if chip is None else chip.num_cores


def vmem_bytes(chip: str | None) -> int:
    """Of each core of the chip with that name, as `name` gives it."""
    if chip is None:
        return SIMULATED_VMEM_BYTES
    version = next(v for v in pltpu.ChipVersion if v.value in (chip, chip.removeprefix("v")))
    return pltpu.get_tpu_info_for_chip(version, 1).vmem_capacity_bytes
