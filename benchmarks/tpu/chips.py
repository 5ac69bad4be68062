"""What one core of each TPU does in a second, and how far the compiler's schedule agrees.

    python -m benchmarks.tpu.chips

A device of v5e, v6e and v7x is one core (a v7x chip is two devices). A device of v5p is two cores that share its
memory, of which a Pallas kernel uses one unless its grid says otherwise; the figures are a core's. Bandwidth and FLOP/s
are the published ones (v5p: https://cloud.google.com/tpu/docs/v5p, and so on), divided by the cores.

The clock is not published. The matrix unit gives it: peak FLOP/s = units x FLOP of one `vmatmul` / cycles of one
`vmatmul` x clock. A `vmatmul` of bfloat16 has 16 rows. OpenXLA's XProf counts 8 cycles for it on v6e and v7x, and
takes 1.75 and 1.9 GHz (the constants of its utilization viewer); v6e's published peak means 1.75 GHz too. v5's unit
takes a row each cycle, so the published peaks mean 1.5 GHz (v5e) and 1.75 GHz (v5p). On v7x the published peak needs
2.2 GHz. We take XProf's 1.9: a loop that the vector units bind is promised no more than a profile would show, and one
that the matrix unit binds ends at 86% of the published peak.

The command compiles a large product by XLA and prints what its loop says to this. On v6e, bundles contain the matrix
unit's time: each `vmatmul` has results to pop, and the schedule spaces these as the unit gives them. On v5 and v7x the
unit queues what it is given, and the compiler issues faster than the unit works; there `matrix_cycles` is the bound.
`vmatpush` (the weights) is spaced by the compiler everywhere; its bundles contain it.
"""

import re
from collections import Counter
from dataclasses import dataclass

VMATMUL = re.compile(r"vmatmul\..*?(?P<dtype>f32|bf16|[fsu]8|e4m3|e5m2)")
_ROWS = 16  # of a vmatmul of bfloat16


@dataclass(frozen=True)
class Chip:
    """One core.

    Attributes:
      clock_hz: bundles a second, if nothing stalls.
      bytes_per_s: of HBM.
      flops_per_s: published peak of bfloat16 products.
      vmem_bytes: all of VMEM.
      num_mxus, mxu_size: matrix units and their side.
      rows_per_cycle: rows of bfloat16 (or float32, of which a `vmatmul` has half as many) that a matrix unit takes.
      cores: of a device.
    """

    clock_hz: float
    bytes_per_s: float
    flops_per_s: float
    vmem_bytes: int
    num_mxus: int
    mxu_size: int
    rows_per_cycle: int
    cores: int = 1

    def filled(self, size: int) -> float:
        """The part of the matrix unit's rows, or columns, that `size` of them fill.

        A product over 128 of 256 rows of the unit, or into 128 of its 256 columns, takes as many cycles as a whole one.
        """
        return size / (-(-size // self.mxu_size) * self.mxu_size)

    def matrix_cycles(self, opcodes: Counter[str]) -> float:
        """Cycles for which the `vmatmul`s among instructions occupy the matrix units, if spread evenly over them."""
        cycles = 0
        for opcode, count in opcodes.items():
            if match := VMATMUL.match(opcode):
                rows = _ROWS // 2 if match["dtype"] == "f32" else _ROWS
                cycles += count * rows // self.rows_per_cycle
        return cycles / self.num_mxus


CHIPS = {
    "v5e": Chip(1.5e9, 819e9, 197e12, 128 << 20, 4, 128, 1),
    "v5p": Chip(1.75e9, 2765e9 / 2, 459e12 / 2, 64 << 20, 4, 128, 1, 2),
    "v6e": Chip(1.75e9, 1640e9, 918e12, 128 << 20, 2, 256, 2),
    "v7x": Chip(1.9e9, 7370e9 / 2, 2307e12 / 2, 64 << 20, 2, 256, 2),
}


def build(chip: str, size: int):
    """A product of two square bfloat16 matrices, for `compile`."""
    import jax
    import jax.numpy as jnp

    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    return jnp.matmul, (matrix, matrix)


def main() -> None:
    from benchmarks.tpu.compile import Case, compile_cases

    print(f"{'core':6}{'peak':>16}   16 rows of bfloat16: XLA's loop, the unit", end="")
    print(f"{'clock for the peak':>20}{'used':>12}")
    for program in compile_cases([Case(__file__, name, {"size": 4096}) for name in CHIPS]):
        if program.error:
            raise SystemExit(f"{program.case.chip}: {program.error}")
        chip = CHIPS[program.case.chip]
        loops = [loop.code for kernel in program.kernels for loop in kernel.root.walk()]
        loop = max(loops, key=lambda loop: loop.slots["MATMUL"])
        cycles = _ROWS / chip.rows_per_cycle
        bundles = loop.num_bundles / chip.matrix_cycles(loop.opcodes) * cycles
        clock_hz = chip.flops_per_s / (chip.num_mxus * chip.rows_per_cycle * 2 * chip.mxu_size**2)
        print(
            f"{program.case.chip:6}{chip.flops_per_s / 1e12:9.1f} TFLOP/s{bundles:24.1f} bundles{cycles:6.0f} cycles"
            f"{clock_hz / 1e9:18.2f} GHz{chip.clock_hz / 1e9:8.2f} GHz"
        )


if __name__ == "__main__":
    main()
