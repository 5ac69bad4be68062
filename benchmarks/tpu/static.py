"""How fast a TPU attention kernel can be, read from its machine code, beside JAX's own kernel; no TPU needed.

    python -m benchmarks.tpu.static
    python -m benchmarks.tpu.static --chips v5e v5p v6e v7x --heads 9 3 64 --json static.json

Each kernel is compiled by libtpu for each chip, JAX's own with several block sizes, of which the best is shown.

  inner loop       bundles of the loop, or branch of it, in which the time goes; how much of each unit's slots they use
                   (matmul and matpush: of the unit's time); vector registers stored and loaded as they did not fit
  /2 MiB, /tile    cycles of all loops that multiply, for 2 MiB of KV; for 128 queries x 128 tokens of KV that they see
  DMA              bytes that cross HBM, of the least that must
  compute, memory  cycles of all loops at the core's clock; those bytes at its bandwidth
  time             the longer of them, and the first fetch or the last block of compute, which nothing hides
  bound            the least bytes at the published bandwidth; the least FLOP at the published peak
  roof, busy       the part of the peak that the kernel's products of such heads can reach, since they fill the matrix
                   unit in part; the part of all cycles in which the matrix units work, full or not
  around           what XLA itself estimates for the operations before and after the kernel, not in time

docs/kernels.md says what this covers and what it cannot know. The machine code does not depend on the machine that
compiles, so neither do the figures; they change with the version of libtpu (libtpu 0.0.52 where the docs quote them).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType

from benchmarks.kernel_workload import Workload
from benchmarks.tpu import jax_kernel, our_kernel
from benchmarks.tpu.chips import CHIPS
from benchmarks.tpu.compile import Case, compile_cases
from benchmarks.tpu.estimate import Estimate, estimate

KERNELS: dict[str, ModuleType] = {module.NAME: module for module in (our_kernel, jax_kernel)}
_UNITS = ("MATMUL", "MATPUSH", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "SALU")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=["v6e", "v7x"])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("N", "K", "H"))
    parser.add_argument("--dtype", default="bfloat16", help="of the cache (bfloat16)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens (64)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of the decode (64)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each of them (4096)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill (2048)")
    parser.add_argument(
        "--loops", action="store_true", help="also where the cycles go: every loop of a percent or more"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    num_heads, num_kv_heads, head_dim = args.heads
    step = partial(
        Workload,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=args.dtype,
        page_size=args.page_size,
    )
    decode = step(num_seqs=args.batch, q_len=1, kv_len=args.context)
    prefill = step(num_seqs=1, q_len=args.prompt, kv_len=args.prompt)
    found: list[Estimate] = []
    for workload in (decode, prefill):
        tried = [measure(chip, KERNELS[name], workload) for chip in args.chips for name in args.kernels]
        best = [e for e in tried if e is not None]
        print_tables(workload, best)
        if args.loops:
            print_loops(best)
        found += best
    if args.json:
        args.json.write_text(json.dumps([figures(e) for e in found], indent=1) + "\n")


def measure(chip: str, module: ModuleType, workload: Workload) -> Estimate | None:
    """The estimate with the best of the kernel's block sizes; None, and a line that says why, if none compiles."""
    choices = module.block_choices(chip, workload)
    cases = [Case(module.FILE, chip, {"workload": asdict(workload), "blocks": blocks}) for blocks in choices]
    programs = compile_cases(cases)
    compiled = [(blocks, p) for blocks, p in zip(choices, programs, strict=True) if p.error is None]
    if not compiled:
        print(f"{chip} {module.NAME}: {workload} compiles with none of {len(choices)} block sizes: {programs[0].error}")
        return None
    estimates = [
        estimate(chip, module, program, workload, blocks, module.counts(workload, blocks))
        for blocks, program in compiled
    ]
    return min(estimates, key=lambda e: e.time_s)


def print_tables(workload: Workload, estimates: Sequence[Estimate]) -> None:
    w, is_decode = workload, workload.q_len == 1
    what = f"{w.num_seqs} sequences of {w.kv_len:,} tokens" if is_decode else f"a prompt of {w.q_len:,} tokens"
    heads = f"{w.num_heads}/{w.num_kv_heads} heads of {w.head_dim}, {w.kv_dtype} cache, pages of {w.page_size}"
    print(f"\n{'decode' if is_decode else 'prefill'}: {what}, {heads}")
    names = "".join(f"{unit.lower():>9}" for unit in _UNITS)
    print(f"\n{'':12}{'inner loop':>10}{'/2 MiB' if is_decode else '/tile':>9}{names}{'spills':>15}{'VMEM':>10}")
    for e in estimates:
        rate = 2 * e.cycles_per_mib if is_decode else e.cycles_per_tile
        code = e.inner.code
        used = {**code.utilization, "MATMUL": CHIPS[e.chip].matrix_cycles(code.opcodes) / e.inner.cycles}
        units = "".join(f"{used[unit]:9.0%}" for unit in _UNITS)
        stores, loads = code.num_vector_spills
        print(
            f"{e.chip:6}{e.kernel:6}{code.num_bundles:10,}{rate:9,.0f}{units}{f'{stores:,}/{loads:,}':>15}"
            f"{e.vmem_bytes / 2**20:6.1f} MiB"
        )
    print(f"\n{'':12}{'DMA':>6}{'compute':>10}{'memory':>10}{'time':>10}{'bound':>10}{'':37}{'around':>11}  blocks")
    for e in estimates:
        bound_s = e.memory_bound_s if is_decode else e.matrix_bound_s
        if is_decode:
            verdict = f"time = {e.time_s / bound_s:.2f} x bound"
        else:
            verdict = f"{bound_s / e.time_s:.0%} of peak, roof {e.matrix_roof:.0%}, busy {e.matrix_busy:.0%}"
        seconds = (e.compute_s, e.memory_s, e.time_s, bound_s)
        print(
            f"{e.chip:6}{e.kernel:6}{e.hbm_bytes / e.least_bytes:5.2f}x"
            + "".join(f"{1e6 * s:7,.0f} us" for s in seconds)
            + f"{verdict:>37}{1e6 * e.around_s:8,.0f} us  "
            + ", ".join(f"{name} {size}" for name, size in e.blocks.items())
        )


def print_loops(estimates: Sequence[Estimate]) -> None:
    for e in estimates:
        print(f"\n{e.chip} {e.kernel}: loops and branches, by where they begin")
        for part in e.parts:
            if (share := part.total / e.cycles) >= 0.01:
                where = f"{'  ' * part.depth}{part.start:#x}"
                print(f"  {where:16}{part.cycles:8,.0f} cycles x {part.trips:8,.0f} trips {share:6.0%} of all")


def figures(e: Estimate) -> dict[str, object]:
    """All figures of an estimate, by name, for a file."""
    code = e.inner.code
    return {
        "chip": e.chip,
        "kernel": e.kernel,
        "workload": asdict(e.workload),
        "blocks": e.blocks,
        "inner_loop": {
            "bundles": code.num_bundles,
            "trips": e.inner.trips,
            "slots": code.slots,
            "utilization": code.utilization,
            "matrix_cycles": CHIPS[e.chip].matrix_cycles(code.opcodes),
            "vector_spill_stores": code.num_vector_spills[0],
            "vector_spill_loads": code.num_vector_spills[1],
            "dmas": code.num_dmas,
        },
        "cycles": e.cycles,
        "cycles_per_mib": e.cycles_per_mib,
        "cycles_per_tile": e.cycles_per_tile,
        "parts": [{"start": part.start, "cycles": part.cycles, "trips": part.trips} for part in e.parts],
        "vmem_bytes": e.vmem_bytes,
        "hbm_bytes": e.hbm_bytes,
        "least_bytes": e.least_bytes,
        "compute_s": e.compute_s,
        "memory_s": e.memory_s,
        "time_s": e.time_s,
        "memory_bound_s": e.memory_bound_s,
        "matrix_bound_s": e.matrix_bound_s,
        "matrix_roof": e.matrix_roof,
        "matrix_busy": e.matrix_busy,
        "num_cores": e.num_cores,
        "around_s": e.around_s,
    }


if __name__ == "__main__":
    main()
