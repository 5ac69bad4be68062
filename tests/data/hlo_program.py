"""XLA's optimized program, from its text."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Instruction:
    """One of XLA's, `%name = type op(operands), attributes`, in the optimized program."""

    op: str
    type: str
    rest: str

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(dtype, shape, layout without the memory space) of each array of the result."""
        # The type of what runs beside the rest, ((operands), result, ...), begins with what it only reads.
        result = re.sub(r"^\(\((?:[^()]|\([\d,]*\))*\), ", "(", self.type)
        found = re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", re.sub(r"S\(\d+\)", "", result))
        return [(dtype, tuple(map(int, dims.split(","))) if dims else (), layout) for dtype, dims, layout in found]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        return {shape for _, shape, _ in self.arrays}

    @property
    def stays(self) -> bool:
        """Whether it leaves an array where it is, or brings it to the core's own memory as it is."""
        if self.op == "copy-start":
            (_, shape, layout), (_, copied_shape, copied_layout), *_ = self.arrays
            return (shape, layout) == (copied_shape, copied_layout)
        return self.op in {"parameter", "bitcast", "tuple", "get-tuple-element", "copy-done"} or (
            self.op == "custom-call" and 'custom_call_target="ConcatBitcast"' in self.rest
        )

    @property
    def is_kernel(self) -> bool:
        """Whether it is one of Pallas' for TPUs or GPUs."""
        target = re.search(r'custom_call_target="(\w+)"', self.rest)
        return target is not None and target[1] in ("tpu_custom_call", "mosaic_gpu_v2")


Computations = dict[str, list[Instruction]]
"""By name; fusions, loops and branches have their own. Parsed once: the text of 80 layers has 24 MB."""


def parse(program: jax.stages.Compiled) -> Computations:
    computations: Computations = {}
    for line in program.as_text().splitlines():
        if head := re.match(r"(?:ENTRY )?(%[\w.-]+) \(", line):
            body = computations[head[1]] = []
        elif match := re.match(r"\s+(?:ROOT )?%\S+ = (.*?) ([a-z][\w-]*)\((.*)$", line):
            body.append(Instruction(match[2], match[1], match[3]))
    return computations


def instructions(computations: Computations) -> Iterator[Instruction]:
    return itertools.chain.from_iterable(computations.values())
