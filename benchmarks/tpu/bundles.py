"""The machine code of a TPU kernel, read from the compiler's dump: its loops, their bundles, and the slots these fill.

A TPU's core is a VLIW machine: it starts one bundle of instructions each cycle, in order. So the bundles of a loop are
the cycles of one trip, unless something stalls. libtpu prints them, with the option of `compile.DUMP_OPTIONS`, in
`*final_bundles.txt`, and the slots that each bundle fills in `*final_hlo-static-per-bundle-utilization.txt`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?P<mark>[A-Z]{2})? *: *(?P<nesting>>*)")
_INSTRUCTION = re.compile(r"^(?:%\S+|_) = (?P<opcode>[\w.]+)")
_SPILL = re.compile(r"(?:(?P<load>sld)|sst) \[smem:\[#allocation\d+_spill\]\]")
_BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(?P<target>\d+)")
_REGION = re.compile(r"(?P<edge>Start|End) region (?P<region>\d+)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_ALLOCATION = re.compile(r"#allocation\d+ \[.*space=vmem, size = (?P<size>0x[0-9a-f]+|\d+)")


@dataclass(frozen=True)
class Bundle:
    """One cycle's instructions. `depth` is the number of loops around it."""

    text: str
    depth: int
    starts_loop: bool

    @cached_property
    def opcodes(self) -> tuple[str, ...]:
        code = _COMMENT.sub("", self.text).strip().removeprefix("{").removesuffix("}")
        matches = (_INSTRUCTION.match(instruction.strip()) for instruction in code.split(";;"))
        return tuple(match["opcode"] for match in matches if match)


@dataclass(frozen=True)
class Code:
    """Some bundles of a kernel: a loop's own, or a part of them.

    Attributes:
      own: int[n], their indices in the kernel.
    """

    kernel: "Kernel" = field(repr=False)
    own: np.ndarray

    @property
    def num_bundles(self) -> int:
        return len(self.own)

    @property
    def slots(self) -> dict[str, int]:
        """Slots used, by unit."""
        return dict(zip(self.kernel.units, self.kernel.used[self.own].sum(axis=0).tolist(), strict=True))

    @property
    def utilization(self) -> dict[str, float]:
        """Part of each unit's slots that is used."""
        return {
            unit: used / (self.kernel.capacity[unit] * max(1, self.num_bundles)) for unit, used in self.slots.items()
        }

    @property
    def opcodes(self) -> Counter[str]:
        return Counter(opcode for i in self.own for opcode in self.kernel.bundles[i].opcodes)

    @property
    def num_dmas(self) -> int:
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith("dma.") and "wait" not in opcode)

    @property
    def num_vector_spills(self) -> tuple[int, int]:
        """(stores, loads) of vector registers that did not fit."""
        return self.slots["VSTORE:SPILL"], self.slots["VLOAD:FILL"]

    @property
    def num_scalar_spills(self) -> tuple[int, int]:
        """(stores, loads) of scalar registers that did not fit."""
        found = [bool(m["load"]) for i in self.own for m in _SPILL.finditer(self.kernel.bundles[i].text)]
        return len(found) - sum(found), sum(found)

    def between(self, start: int, stop: int) -> "Code":
        return Code(self.kernel, self.own[(start <= self.own) & (self.own < stop)])

    def without(self, parts: Iterable["Code"]) -> "Code":
        return Code(self.kernel, np.setdiff1d(self.own, [i for part in parts for i in part.own]))


@dataclass(frozen=True)
class Region:
    """Bundles [start, stop) of the kernel that a branch can skip."""

    start: int
    stop: int


@dataclass(eq=False)
class Loop:
    """Bundles [start, stop) of the kernel, loops within them in `loops`. The root stands for the whole kernel."""

    kernel: "Kernel" = field(repr=False)
    start: int
    stop: int
    depth: int
    loops: list["Loop"] = field(default_factory=list)

    @cached_property
    def code(self) -> Code:
        """The bundles that belong to no inner loop: what a trip takes. What a branch can skip is among them."""
        inner = [i for loop in self.loops for i in range(loop.start, loop.stop)]
        return Code(self.kernel, np.setdiff1d(np.arange(self.start, self.stop), inner))

    @cached_property
    def regions(self) -> list[Region]:
        """What a branch of the loop's own code can skip, outermost first."""
        return [region for region in self.kernel.regions if self is self.kernel.loop_at(region.start)]

    @cached_property
    def alternatives(self) -> list[Code]:
        """Parts of the loop's own code that a branch can skip and that multiply matrices, the innermost of such."""
        parts = [self.code.between(region.start, region.stop) for region in self.regions]
        parts = [part for part in parts if part.slots["MATMUL"]]
        return [p for p in parts if not any(q is not p and set(q.own) <= set(p.own) for q in parts)]

    def walk(self) -> Iterator["Loop"]:
        yield self
        for loop in self.loops:
            yield from loop.walk()


class Kernel:
    """One kernel (or fusion) of a compiled program.

    Attributes:
      name: the HLO instruction.
      is_pallas: whether it is a Pallas kernel.
      bundles, used: its bundles and int[num_bundles, num_units], the slots that they fill.
      capacity: slots of each unit in a bundle. "VLOAD:FILL" and "VSTORE:SPILL" are a part of "VLOAD" and "VSTORE".
      vmem_bytes: VMEM of its scratch and of the compiler's, windows of pipelined operands included.
      root: the tree of loops.
      regions: what branches can skip.
    """

    def __init__(self, dump: Path, prefix: str):
        self.name = re.sub(r"^\d+-", "", prefix)
        self.bundles = _read_bundles(_one(dump, prefix, "final_bundles.txt"))
        self.units, self.capacity, self.used = _read_utilization(
            _one(dump, prefix, "final_hlo-static-per-bundle-utilization.txt")
        )
        if len(self.used) != len(self.bundles):
            raise ValueError(f"{self.name}: {len(self.bundles)} bundles, utilization of {len(self.used)} in {dump}")
        self.is_pallas = "tpu_custom_call" in _one(dump, prefix, "schedule-analysis_final_bundles.txt").read_text()
        registers = _one(dump, prefix, "pre-finalize-registers-and-allocations.txt").read_text()
        self.vmem_bytes = sum(int(m["size"], 0) for m in _ALLOCATION.finditer(registers))
        self.root = self._loop_tree()
        self.regions = self._regions()

    def _loop_tree(self) -> Loop:
        root = Loop(self, 0, len(self.bundles), 0)
        stack = [root]
        for i, bundle in enumerate(self.bundles):
            while len(stack) - 1 > bundle.depth or (bundle.starts_loop and len(stack) - 1 == bundle.depth):
                stack.pop().stop = i
            if bundle.starts_loop:
                loop = Loop(self, i, len(self.bundles), bundle.depth)
                stack[-1].loops.append(loop)
                stack.append(loop)
            if len(stack) - 1 != bundle.depth:
                raise ValueError(f"{self.name}: bundle {i:#x} is in {bundle.depth} loops, of {len(stack) - 1} begun")
        return root

    def _regions(self) -> list[Region]:
        # A forward branch jumps to region n over region n - 1, whose end is told where it lies.
        starts = {int(m["region"]): i for i, b in enumerate(self.bundles) for m in _edges(b, "Start")}
        ends = {int(m["region"]): i for i, b in enumerate(self.bundles) for m in _edges(b, "End")}
        regions = []
        for i, bundle in enumerate(self.bundles):
            for match in _BRANCH.finditer(bundle.text):
                target = int(match["target"])
                is_forward = starts.get(target, i + 1) > i
                if is_forward and ends.get(target - 1, -1) > i:
                    regions.append(Region(i + 1, ends[target - 1] + 1))
        return regions

    def loop_at(self, index: int) -> Loop:
        """The innermost loop around a bundle."""
        loop = self.root
        while inner := next((inner for inner in loop.loops if inner.start <= index < inner.stop), None):
            loop = inner
        return loop


def read_kernels(dump: Path) -> list[Kernel]:
    """All kernels and fusions in a dump of one program, in the order of their compilation."""
    names = sorted(path.name for path in dump.glob("*-final_bundles.txt"))
    prefixes = [re.sub(r"-\d+-final_bundles\.txt$", "", name) for name in names]
    return [Kernel(dump, p) for p in prefixes if not re.match(r"\d+-(TLP|<)", p)]


def _one(dump: Path, prefix: str, suffix: str) -> Path:
    pattern = re.compile(re.escape(prefix) + r"-\d+-" + re.escape(suffix) + "$")
    found = [path for path in dump.iterdir() if pattern.match(path.name)]
    if len(found) != 1:
        raise FileNotFoundError(f"{len(found)} files {prefix}-*-{suffix} in {dump}; expected one")
    return found[0]


def _read_bundles(path: Path) -> list[Bundle]:
    # A bundle begins a line; comments within it may hold line breaks.
    chunks: list[list[str]] = []
    for line in path.read_text().splitlines():
        if _BUNDLE.match(line):
            chunks.append([line])
        elif chunks:
            chunks[-1].append(line)
    heads = [_BUNDLE.match(chunk[0]) for chunk in chunks]
    texts = ["\n".join(chunk)[head.end() :] for chunk, head in zip(chunks, heads, strict=True) if head]
    depths = [len(head["nesting"]) for head in heads if head]
    starts = [head["mark"] == "LB" for head in heads if head]
    for i in range(1, len(depths)):
        # Empty bundles, the delay slots of a branch, bear no mark of nesting ...
        if not depths[i] and not _COMMENT.sub("", texts[i]).strip(" {}\n"):
            depths[i] = depths[i - 1]
    for i in range(1, len(depths)):
        # ... and a branch may bear its target's, in front of delay slots that are filled from the loop.
        j = i - 1
        while not starts[i] and depths[j] < depths[i]:
            depths[j] = depths[i]
            j -= 1
    return [Bundle(*bundle) for bundle in zip(texts, depths, starts, strict=True)]


def _edges(bundle: Bundle, edge: str) -> Iterator[re.Match[str]]:
    return (match for match in _REGION.finditer(bundle.text) if match["edge"] == edge)


def _read_utilization(path: Path) -> tuple[list[str], dict[str, int], np.ndarray]:
    """The units, their slots in a bundle, and int[num_bundles, num_units] of used slots."""
    lines = path.read_text().splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("MATMUL"))
    units = [unit.strip() for unit in lines[header].split(",")]
    capacity = dict(zip(units, map(int, lines[header + 1].split()), strict=True))
    start = next(i for i, line in enumerate(lines) if line.startswith("== UTILIZATION")) + 1
    return units, capacity, np.array([line.split() for line in lines[start:] if line.strip()], int)
