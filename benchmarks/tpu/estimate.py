"""From a kernel's machine code and its bytes to a time: a bound from below, and where it comes from."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from benchmarks.kernel_workload import Workload
from benchmarks.tpu.bundles import Code, Loop
from benchmarks.tpu.chips import CHIPS, Chip
from benchmarks.tpu.compile import Program
from benchmarks.tpu.interpret import Counts, Trips


@dataclass(frozen=True)
class Part:
    """Bundles that run together: a loop's own, or a branch of them that multiplies matrices.

    Attributes:
      start: the first bundle of the loop or of the branch.
      cycles: of one trip: the greater of the bundles and of the time that the products occupy the matrix units.
      trips: how often it runs in all.
    """

    code: Code
    depth: int
    start: int
    cycles: float
    trips: float

    @property
    def total(self) -> float:
        return self.cycles * self.trips


@dataclass(frozen=True)
class Estimate:
    """One kernel on one chip for one workload.

    Attributes:
      blocks: the block sizes.
      parts: all of the kernel. A branch without products counts whole in each trip of its loop.
      hbm_bytes, least_bytes: what crosses HBM, and what must.
      num_fetches: the blocks of KV that are fetched one after the other.
      num_cores: the cores of a device that share the work.
      matrix_roof: the part of the published peak that the kernel can reach with such heads on so many cores.
      vmem_bytes: of the kernel.
      around_cycles: XLA's own estimate of the operations before and after the kernel, in cycles.
    """

    chip: str
    kernel: str
    workload: Workload
    blocks: dict[str, int]
    parts: list[Part]
    hbm_bytes: float
    least_bytes: int
    num_fetches: int
    num_cores: int
    matrix_roof: float
    vmem_bytes: int
    around_cycles: int

    @property
    def _chip(self) -> Chip:
        return CHIPS[self.chip]

    @property
    def is_decode(self) -> bool:
        return self.workload.q_len == 1

    @property
    def cycles(self) -> float:
        """Of all parts together."""
        return sum(part.total for part in self.parts)

    @property
    def inner(self) -> Part:
        """Where most of the time goes."""
        return max(self.parts, key=lambda part: part.total)

    @property
    def product_cycles(self) -> float:
        """Of those parts alone that multiply matrices."""
        return sum(part.total for part in self.parts if part.code.slots["MATMUL"])

    @property
    def compute_s(self) -> float:
        num_seqs = self.workload.num_seqs  # Each is one core's.
        return self.cycles / self._chip.clock_hz * -(-num_seqs // self.num_cores) / num_seqs

    @property
    def memory_s(self) -> float:
        return self.hbm_bytes / self._device_bytes_per_s

    @property
    def _device_bytes_per_s(self) -> float:
        return self._chip.bytes_per_s * self._chip.cores

    @property
    def time_s(self) -> float:
        """Of the kernel: a pipeline of equal blocks, of which the first fetch and the last compute stand alone."""
        shorter, longer = sorted([self.memory_s, self.compute_s])
        return longer + shorter * self.num_cores / self.num_fetches

    @property
    def around_s(self) -> float:
        return self.around_cycles / self._chip.clock_hz

    @property
    def memory_bound_s(self) -> float:
        """The least bytes at the published bandwidth."""
        return self.least_bytes / self._device_bytes_per_s

    @property
    def matrix_bound_s(self) -> float:
        """The least FLOP at the published peak."""
        return self.workload.flops / (self._chip.flops_per_s * self._chip.cores)

    @property
    def matrix_busy(self) -> float:
        """The part of all cycles in which the matrix units work, full or not."""
        return sum(self._chip.matrix_cycles(p.code.opcodes) * p.trips for p in self.parts) / self.cycles

    @property
    def cycles_per_mib(self) -> float:
        """Cycles of the loops that multiply, for each MiB of live KV (decode)."""
        return self.product_cycles / (self.workload.kv_bytes / 2**20)

    @property
    def cycles_per_tile(self) -> float:
        """The same for each tile of 128 queries x 128 tokens of KV, all heads, counted where causality lets see."""
        w = self.workload
        pairs = w.num_seqs * (w.q_len * w.kv_len - w.q_len * (w.q_len - 1) / 2)
        return self.product_cycles / (pairs / 128**2)


def estimate(
    chip: str, module: ModuleType, program: Program, workload: Workload, blocks: dict[str, int], counts: Counts
) -> Estimate:
    """What a compiled program of `module`'s kernel takes, whose loops make the trips that were counted.

    Raises:
      ValueError: the machine code has other loops than the kernel's code.
    """
    (kernel,) = program.pallas_kernels
    return Estimate(
        chip=chip,
        kernel=module.NAME,
        workload=workload,
        blocks=blocks,
        parts=[
            part
            for loop, trips in _matched(kernel.root, counts.root, kernel.name)
            for part in _parts(chip, loop, trips)
        ],
        hbm_bytes=counts.hbm_bytes,
        least_bytes=module.least_bytes(workload),
        num_fetches=module.num_fetches(workload, blocks),
        num_cores=(num_cores := module.num_cores(CHIPS[chip], workload)),
        matrix_roof=module.matrix_roof(CHIPS[chip], workload) * num_cores / CHIPS[chip].cores,
        vmem_bytes=kernel.vmem_bytes,
        around_cycles=program.around_cycles,
    )


def _parts(chip: str, loop: Loop, trips: Trips) -> Iterator[Part]:
    # Where the compiler has made no branch of a condition, or two of one, its code counts whole.
    branches = loop.alternatives if len(loop.alternatives) == len(trips.alternatives) else []
    whole = loop.code.without(branches)
    counted = [(whole, trips.count), *zip(branches, trips.alternatives[: len(branches)], strict=True)]
    for code, count in counted:
        cycles = max(code.num_bundles, CHIPS[chip].matrix_cycles(code.opcodes))
        start = loop.start if code is whole else int(code.own[0])
        yield Part(code, loop.depth + (code is not whole), start, cycles, count)


def _matched(loop: Loop, trips: Trips, name: str) -> list[tuple[Loop, Trips]]:
    pairs = _pairs([loop], [trips])
    if pairs is None:
        raise ValueError(
            f"{name}: the machine code has the loops {_shape(loop)}, the kernel's code {_shape(trips)}: "
            "the compiler has unrolled or split one"
        )
    return pairs


def _pairs(loops: list[Loop], trips: list[Trips]) -> list[tuple[Loop, Trips]] | None:
    """Loops with the trips that they make; None if they do not fit each other.

    The compiler keeps the order and the nesting of loops. It adds loops of its own where it turns the DMA of an operand
    that XLA has put into VMEM into loads and stores; they are left out.
    """
    if not loops:
        return None if trips else []
    if trips:
        inner = _pairs(loops[0].loops, trips[0].loops)
        rest = _pairs(loops[1:], trips[1:])
        if inner is not None and rest is not None:
            return [(loops[0], trips[0]), *inner, *rest]
    return _pairs(loops[1:], trips) if _is_copy(loops[0]) else None


def _shape(loop: Loop | Trips) -> str:
    return f"[{''.join(map(_shape, loop.loops))}]"


def _is_copy(loop: Loop) -> bool:
    used = {unit for unit, slots in loop.code.slots.items() if slots}
    return not loop.loops and not loop.code.num_dmas and {"VLOAD", "VSTORE"} <= used <= {"VLOAD", "VSTORE", "SALU"}
