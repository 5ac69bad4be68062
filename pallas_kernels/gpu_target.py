"""Hopper GPUs to compile for where there is none: JAX's CUDA plugin holds the compilers and needs no card.

The plugin must not be in the environment of ordinary programs, where JAX would try to start the GPU that is not there.
`make cuda` installs it into a folder of its own, and `environment` makes the variables of a process that finds it.
What Mosaic GPU's kernels take of the card (registers, shared memory, spills) comes from their own compilation:
`compile_with_figures`.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from jaxlib.mlir import ir

# cudaDeviceProp on an H200, and what the H100 with 80 GB of HBM3 (SXM) has otherwise: its memory.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: {threads_per_warp}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_bytes_per_block}
  shared_memory_per_core: {shared_bytes_per_sm}
  threads_per_core_limit: {threads_per_sm}
  core_count: {num_sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bytes_per_s}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: {registers_per_sm}
  registers_per_block_limit: {registers_per_sm}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


DUMP_VARIABLE = "MOSAIC_GPU_DUMP_TO"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is told of a GPU to the compiler, and what an SM of it has room for."""

    name: str
    memory_bytes: int
    bytes_per_s: int
    num_sms: int = 132
    registers_per_sm: int = 65_536
    shared_bytes_per_sm: int = 233_472
    shared_bytes_per_block: int = 232_448
    threads_per_sm: int = 2048
    threads_per_warp: int = 32
    blocks_per_sm: int = 32

    def description(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        return _DESCRIPTION.format(**vars(self))


CARDS = {
    "h200": Card(name="NVIDIA H200", memory_bytes=150_000_000_000, bytes_per_s=4_800_000_000_000),
    "h100": Card(name="NVIDIA H100 80GB HBM3", memory_bytes=85_000_000_000, bytes_per_s=3_350_000_000_000),
}


def environment(plugin: Path) -> dict[str, str]:
    """The variables of a process that can make a `gpu_mesh` with the plugin in that folder; it computes on the CPU.

    Its ptxas is the one beside the plugin, if that is there, whatever else the machine has.
    """

    def first(folder: Path, variable: str) -> str:
        return os.pathsep.join(filter(None, [str(folder.absolute()), os.environ.get(variable)]))

    return {
        **os.environ,
        "PYTHONPATH": first(plugin, "PYTHONPATH"),
        "PATH": first(plugin / "nvidia" / "cu13" / "bin", "PATH"),
        "JAX_PLATFORMS": "cpu",
    }


def gpu_mesh(card: str, num_devices: int = 1) -> Mesh:
    """A mesh ("data", "model") of shape (1, num_devices), all described, to lower and compile for under `jax.set_mesh`.

    Raises:
      ValueError: no card of that name in CARDS.
      FileNotFoundError: the plugin is not there.
    """
    if card not in CARDS:
        raise ValueError(f"card is {card!r}; choose one of {', '.join(CARDS)}")
    try:
        topology = topologies.get_topology_desc(
            f"1x1x{num_devices}", "cuda", topology=f"1x1x{num_devices}", target_config=CARDS[card].description()
        )
    except NotImplementedError as error:
        raise FileNotFoundError(
            "JAX's CUDA plugin was not found: install it into a folder with `make cuda`, and start Python with the "
            "variables of `gpu_target.environment`"
        ) from error
    return Mesh(np.array(topology.devices).reshape(1, num_devices), ("data", "model"))


class Loop(NamedTuple):
    """An innermost loop of the machine code in which something is multiplied: what one trip issues in each warp."""

    num_instructions: int
    num_wgmma: int


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """What one Mosaic GPU kernel takes, as ptxas says, and the tensor core's instructions in its text.

    registers: of each thread. spill_bytes: stored and loaded. dynamic_shared_bytes: what the launch asks for.
    num_wgmma: in the PTX, where one in a loop counts once. loops: in the order of the code; none where there is no
    nvdisasm.
    """

    name: str
    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    num_wgmma: int
    loops: tuple[Loop, ...] = ()

    def blocks_per_sm(self, card: Card) -> int:
        """How many blocks run on an SM at once; 0 for what does not fit. (CUDA's occupancy calculator, for 9.0.)"""
        warps = -(-self.threads // card.threads_per_warp)
        registers_per_warp = _round_up(self.registers * card.threads_per_warp, 256)
        registers = _round_up(warps, 4) * registers_per_warp  # An SM has four parts, and each its own registers.
        shared_bytes = _round_up(self.static_shared_bytes + self.dynamic_shared_bytes, 128)
        if shared_bytes > card.shared_bytes_per_block:
            return 0
        return min(
            card.blocks_per_sm,
            card.threads_per_sm // (warps * card.threads_per_warp),
            card.registers_per_sm // registers,
            card.shared_bytes_per_sm // (shared_bytes + 1024),  # CUDA keeps 1 KiB of each block for itself.
        )


def compile_with_figures(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, list[KernelFigures]]:
    """Compiles a program for a GPU, and says what each different Mosaic GPU kernel in it takes, in order of name."""
    _rename_kernels(lowered)
    with tempfile.TemporaryDirectory() as folder, _set(DUMP_VARIABLE, folder):
        compiled = lowered.compile()
        return compiled, read_figures(Path(folder))


def read_figures(folder: Path) -> list[KernelFigures]:
    """Of the kernels that were compiled while $MOSAIC_GPU_DUMP_TO named that folder, in order of name."""
    return [_parse(path.with_suffix("")) for path in sorted(folder.glob("*.ptxas"))]


def _rename_kernels(lowered: jax.stages.Lowered) -> None:
    # A kernel that this process, or the persistent cache, has seen before would not be compiled again, and would tell
    # nothing. Both know it by its hash.
    salt = os.urandom(16)

    def rename(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op.attributes["call_target_name"]):
            config: Any = ir.DictAttr(op.attributes["mhlo.backend_config"])
            attributes = {named.name: named.attr for named in config}
            salted = hashlib.sha256(ir.StringAttr(attributes["kernel_hash"]).value_bytes + salt).digest()
            with op.context:
                attributes["kernel_hash"] = ir.StringAttr.get(salted)
                op.attributes["mhlo.backend_config"] = ir.DictAttr.get(attributes)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    module.operation.walk(rename)


def _parse(base: Path) -> KernelFigures:
    # Mosaic GPU writes these, and the passes' text, for each kernel that it compiles.
    ptxas, ptx = base.with_suffix(".ptxas").read_text(), base.with_suffix(".ptx").read_text()
    passes = base.with_suffix(".mlir-passes.log").read_text()
    registers, static_shared_bytes = _one(r"Used (\d+) registers(?:, used \d+ barriers)?(?:, (\d+) bytes smem)?", ptxas)
    stack, stores, loads = _one(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    return KernelFigures(
        name=_one(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for", ptxas)[0],
        threads=int(np.prod([int(n) for n in _one(r"\.(?:maxntid|reqntid) (\d+), (\d+), (\d+)", ptx)])),
        registers=int(registers),
        stack_bytes=int(stack),
        spill_bytes=int(stores) + int(loads),
        static_shared_bytes=int(static_shared_bytes or 0),
        dynamic_shared_bytes=int(_one(r"dynamic_shared_memory_size %c(\d+)_i32", passes)[0]),
        num_wgmma=ptx.count("wgmma.mma_async"),
        loops=find_loops(sass.read_text()) if (sass := base.with_suffix(".sass_ctrl")).exists() else (),
    )


def find_loops(sass: str) -> tuple[Loop, ...]:
    """The innermost loops with products in nvdisasm's text: a jump back is the end of one."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif text := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w.*)", line):
            instructions.append(text[1])
    loops: list[tuple[int, int]] = []
    for end, instruction in enumerate(instructions):
        jump = re.match(r"BRA\b.*`\((\.L_\w+)\)", instruction)
        begin = labels.get(jump[1], end + 1) if jump else end + 1
        products = sum("HGMMA" in text for text in instructions[begin : end + 1])
        # What begins before the last loop holds it, or shares its code.
        if products and not (loops and begin <= loops[-1][1]):
            loops.append((begin, end))
    return tuple(
        Loop(end + 1 - begin, sum("HGMMA" in text for text in instructions[begin : end + 1])) for begin, end in loops
    )


def _one(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern!r} in what Mosaic GPU wrote: {text[:2000]}"
    return match.groups()


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
