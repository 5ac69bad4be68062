"""Finds block sizes for our TPU kernel from its machine code, and writes them into the kernel's table.

    python -m benchmarks.tpu.tune                                      # all shapes below, for all chips: hours
    python -m benchmarks.tpu.tune --chips v6e --heads 32 8 128         # one shape: some minutes

Starts from the sizes of the kernel's rule and goes to half or twice the tokens of a product, and for prompts also the
queries of a tile, as long as that is better by one part in a hundred. Rated is the mean of time / bound over the
contexts below, with the estimate of `estimate.py`. What differs from the rule in the end becomes a row of the
table. Sizes of fetches stay as the rule has them: what they cost, a DMA's latency, is not in machine code.

A shape that has a row is left alone (remove it to tune again), and a row is written as soon as it is found: so the
command can be stopped, and goes on where it was.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from statistics import mean

from benchmarks.kernel_workload import Workload
from benchmarks.tpu import our_kernel
from benchmarks.tpu.chips import CHIPS
from benchmarks.tpu.compile import Case, compile_cases
from benchmarks.tpu.estimate import estimate
from benchmarks.tpu.interpret import Counts
from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import Layout

# Heads on one device: (query heads, KV heads, size). Llama 3.1 8B and Qwen3 8B at TP 1; Llama 3.1 70B and Qwen3 32B at
# TP 8; 8B at TP 8; 70B at TP 1; SmolLM2 135M; Gemma 3 27B; Qwen3 0.6B; 70B and 8B at TP 4; Gemma 3 270M; gpt-oss 20B.
SHAPES = (
    (32, 8, 128),
    (8, 1, 128),
    (4, 1, 128),
    (64, 8, 128),
    (9, 3, 64),
    (32, 16, 128),
    (16, 8, 128),
    (16, 2, 128),
    (8, 2, 128),
    (4, 1, 256),
    (64, 8, 64),
)
NUM_DECODES, DECODE_CONTEXTS = 64, (4096, 1024, 256)
CHUNK_TOKENS, PROMPTS = 2048, (2048, 512)  # As many prompts as give so many tokens.
WORTH_A_ROW = 0.99


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--heads", type=int, nargs=3, metavar=("N", "K", "H"), help="one shape of heads (those below)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="of the cache (bfloat16)")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[64], help="tokens (64)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for shape in [tuple(args.heads)] if args.heads else SHAPES:
        for dtype in args.dtypes:
            for page_size in args.page_sizes:
                for chip in args.chips:  # Innermost: what is counted serves all chips.
                    tune(chip, *shape, dtype, page_size)


def tune(chip: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, page_size: int) -> None:
    """Searches for one shape, and adds a row to the table if it finds something."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    step = partial(Workload, **heads, kv_dtype=dtype, page_size=page_size)
    decodes = tuple(step(num_seqs=NUM_DECODES, q_len=1, kv_len=n) for n in DECODE_CONTEXTS)
    prompts = tuple(step(num_seqs=CHUNK_TOKENS // n, q_len=n, kv_len=n) for n in PROMPTS)
    layout = our_kernel.layout_of(decodes[0])
    name = f"{chip} {tpu_blocks.key(layout)}"
    rows = json.loads(tpu_blocks.TABLE.read_text())
    if tpu_blocks.key(layout) in rows.get(chip, {}):
        print(f"{name}: has a row", flush=True)
        return
    rule = tpu_blocks.rule(layout, chip)
    blocks = best(chip, layout, decodes, rule, ["decode_tokens"])
    blocks = best(chip, layout, prompts, blocks, ["chunk_queries", "chunk_tokens"])
    if blocks == rule:
        print(f"{name}: the rule serves it", flush=True)
        return
    rows.setdefault(chip, {})[tpu_blocks.key(layout)] = asdict(blocks)
    tpu_blocks.TABLE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(f"{name}: a row", flush=True)


def best(chip: str, layout: Layout, workloads: tuple[Workload, ...], start: Blocks, names: Sequence[str]) -> Blocks:
    """From `start`, one of the named sizes is halved or doubled for as long as that is worth a row."""
    ratings: dict[Blocks, float] = {}
    while True:
        sizes = asdict(start)
        near = [start] + [replace(start, **{n: size}) for n in names for size in (sizes[n] // 2, sizes[n] * 2)]
        near = [blocks for blocks in near if blocks not in ratings and tpu_blocks.is_valid(layout, blocks, chip)]
        ratings |= rate(chip, layout, workloads, near, names)
        found = min(ratings, key=lambda blocks: ratings[blocks])
        if ratings[found] >= WORTH_A_ROW * ratings[start]:
            return start
        start = found


def rate(
    chip: str, layout: Layout, workloads: tuple[Workload, ...], tried: Sequence[Blocks], names: Sequence[str]
) -> dict[Blocks, float]:
    """The mean of time / bound with each of the block sizes; infinite where they do not compile."""
    cases = [
        Case(our_kernel.FILE, chip, {"workload": asdict(workloads[0]), "blocks": asdict(blocks)}) for blocks in tried
    ]
    ratings = {}
    for blocks, program in zip(tried, compile_cases(cases), strict=True):
        title = f"  {chip} {tpu_blocks.key(layout)}: " + ", ".join(f"{name} {asdict(blocks)[name]}" for name in names)
        ratings[blocks] = float("inf")
        if program.error is not None:
            print(f"{title}: {program.error}", flush=True)
            continue
        found = [
            estimate(chip, our_kernel, program, workload, asdict(blocks), counts)
            for workload, counts in zip(workloads, counts_each(workloads, relevant(blocks, names)), strict=True)
        ]
        ratings[blocks] = mean(e.time_s / (e.memory_bound_s if e.is_decode else e.matrix_bound_s) for e in found)
        times = ", ".join(f"{1e6 * e.time_s:,.0f}" for e in found)
        print(f"{title}: {ratings[blocks]:.3f} x bound ({times} us)", flush=True)
    return ratings


def relevant(blocks: Blocks, names: Sequence[str]) -> Blocks:
    """The block sizes with all but those of the named sizes' kind, decode or chunk, as they may be everywhere."""
    kind = names[0].split("_")[0]
    others = {name: 256 for name in asdict(blocks) if not name.startswith(kind)}
    return replace(blocks, **others)


@cache  # They are the same for all chips.
def counts_each(workloads: tuple[Workload, ...], blocks: Blocks) -> list[Counts]:
    return our_kernel.counts_each(workloads, asdict(blocks))


if __name__ == "__main__":
    main()
