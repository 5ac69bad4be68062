"""Finds block sizes for our TPU kernel from its machine code, and writes them into the kernel's table.

    python benchmarks/tpu_tune.py                                      # all shapes below, for all chips: hours
    python benchmarks/tpu_tune.py --chips v6e --heads 32 8 128         # one shape: 4 minutes

Tries the sizes of products and of query tiles, a field at a time from the kernel's rule on, and keeps what the estimate
of `tpu_estimate.py` finds fastest; among those within one part in a hundred, what leaves the core idle most. Sizes of
fetches stay as the rule has them: what they cost, a DMA's latency, is not in machine code. Rows of other shapes in the
table stay.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import tpu_our_kernel
from tpu_chips import CHIPS
from tpu_compile import Case, compile_cases
from tpu_estimate import Estimate, estimate
from tpu_interpret import Counts
from tpu_workload import Workload

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks

TABLE = Path(tpu_blocks.__file__).with_name("tpu_block_sizes.json")
# Heads on one device: (query heads, KV heads, size). Llama 3.1 8B and 70B at TP 1, 4, 8; Qwen3 0.6B, 8B, 32B;
# Gemma 3 270M and 27B; SmolLM2 135M; gpt-oss 20B.
SHAPES = (
    (32, 8, 128),
    (64, 8, 128),
    (16, 8, 128),
    (16, 2, 128),
    (8, 2, 128),
    (8, 1, 128),
    (4, 1, 128),
    (32, 16, 128),
    (4, 1, 256),
    (9, 3, 64),
    (64, 8, 64),
)
# What is tried of each field, for decodes and for prompts.
DECODE_FIELDS = {"decode_tokens": (128, 256, 512, 1024)}
CHUNK_FIELDS = {"chunk_queries": (32, 64, 128, 256), "chunk_tokens": (128, 256, 512)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--heads", type=int, nargs=3, metavar=("N", "K", "H"), help="one shape of heads (those below)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="of the cache (bfloat16)")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[64], help="tokens (64)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for chip in args.chips:
        for shape in [tuple(args.heads)] if args.heads else SHAPES:
            for dtype in args.dtypes:
                for page_size in args.page_sizes:
                    tune(chip, shape, dtype, page_size)


def tune(chip: str, shape: tuple[int, int, int], dtype: str, page_size: int) -> None:
    """Searches for one shape and adds its row to the table."""
    num_heads, num_kv_heads, head_dim = shape
    step = partial(
        Workload,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=dtype,
        page_size=page_size,
    )
    decode = step(num_seqs=64, q_len=1, kv_len=4096)
    prefill = step(num_seqs=1, q_len=2048, kv_len=2048)
    key = "/".join(map(str, (*shape, dtype, page_size)))
    blocks = tpu_our_kernel.block_choices(chip, decode)[0]
    for workload, fields in ((decode, DECODE_FIELDS), (prefill, CHUNK_FIELDS)):
        for name, sizes in fields.items():
            found = list(estimates(chip, workload, [{**blocks, name: size} for size in sizes]))
            if not found:
                raise SystemExit(f"{chip} {key}: compiles with no {name} of {sizes}")
            fastest_s = min(e.time_s for e in found)
            best = min((e for e in found if e.time_s <= 1.01 * fastest_s), key=lambda e: e.compute_s)
            tried = ", ".join(f"{e.blocks[name]}: {1e6 * e.time_s:.0f} us" for e in found)
            print(f"{chip} {key}: {name} {best.blocks[name]} ({tried})", flush=True)
            blocks = best.blocks
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    table.setdefault(chip, {})[key] = blocks
    rows = {c: dict(sorted(table[c].items())) for c in sorted(table)}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


def estimates(chip: str, workload: Workload, choices: list[dict[str, int]]) -> Iterator[Estimate]:
    """Of those block sizes that are valid and compile."""
    choices = [c for c in choices if c["decode_tokens"] <= c["decode_fetch"] and c["chunk_tokens"] <= c["chunk_fetch"]]
    cases = [Case(tpu_our_kernel.FILE, chip, {"workload": asdict(workload), "blocks": blocks}) for blocks in choices]
    for blocks, program in zip(choices, compile_cases(cases), strict=True):
        if program.error is None:
            yield estimate(chip, tpu_our_kernel, program, workload, blocks, counts(workload, *blocks.items()))


@cache  # They are the same for all chips.
def counts(workload: Workload, *blocks: tuple[str, int]) -> Counts:
    return tpu_our_kernel.counts(workload, dict(blocks))


if __name__ == "__main__":
    main()
