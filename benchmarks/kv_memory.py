"""What the KV cache of one request takes, with groups of layers and with one page table for all layers.

    python benchmarks/kv_memory.py

`one table` keeps every token in every layer. `decoding` is what a request holds while it writes, `reading` the most it
holds while its prompt is read in chunks; one request at a time does that. All are counted by running the scheduler,
pages of 64 tokens in bfloat16, chunks of 2,048 tokens. Needs no weights.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.layer_groups import LayerGroups
from jaxllm.scheduler import Request, SampledTokens, Scheduler, SchedulerConfig

PAGE_SIZE = 64
MAX_CHUNK_TOKENS = 2048
NUM_NEW_TOKENS = 130  # so that pages fill and leave while it decodes
BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Shape:
    """What a model's config says of its cache (config.json of the model's page on the Hugging Face hub)."""

    name: str
    cache_specs: tuple[CacheSpec, ...]

    @property
    def token_bytes(self) -> int:
        """K and V of a token in one layer: the layers of these models keep equally much."""
        (token_size,) = {spec.token_size for spec in self.cache_specs}
        return token_size * BYTES_PER_VALUE


def _shape(name: str, sliding_windows: tuple[int | None, ...], num_kv_heads: int, head_dim: int) -> Shape:
    specs = (
        CacheSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=window) for window in sliding_windows
    )
    return Shape(name, tuple(specs))


def _gemma3(name: str, num_layers: int, num_kv_heads: int, head_dim: int, window: int) -> Shape:
    windows = tuple(window if (layer + 1) % 6 else None for layer in range(num_layers))
    return _shape(f"Gemma 3 {name}", windows, num_kv_heads, head_dim)


SHAPES = (
    _gemma3("270M", 18, 1, 256, 512),
    _gemma3("1B", 26, 1, 256, 512),
    _gemma3("4B", 34, 4, 256, 1024),
    _gemma3("12B", 48, 8, 256, 1024),
    _gemma3("27B", 62, 16, 128, 1024),
    _shape("Mistral 7B v0.1", (4096,) * 32, 8, 128),
    _shape("Llama 3.1 8B", (None,) * 32, 8, 128),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of one request: the most while its prompt is read, and the most while it decodes."""

    reading: int
    decoding: int


def measure(shape: Shape, groups: LayerGroups, num_prompt_tokens: int) -> Memory:
    """Runs the scheduler with one request, and looks at the pages in use after each step."""
    max_model_len = num_prompt_tokens + NUM_NEW_TOKENS
    num_pages = 1 + groups.num_groups * -(-max_model_len // PAGE_SIZE)
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=MAX_CHUNK_TOKENS,
        max_model_len=max_model_len,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        windows=groups.windows,
    )
    scheduler = Scheduler(config)
    scheduler.add_request(Request("a", np.arange(num_prompt_tokens).tolist(), max_tokens=NUM_NEW_TOKENS))
    used = {False: 0, True: 0}
    while (plan := scheduler.schedule()) is not None:
        used[plan.is_decode_only] = max(used[plan.is_decode_only], scheduler.stats().num_used_pages)
        scheduler.update(plan, SampledTokens.one_each(np.zeros(1, np.int32)))
    page_bytes = groups.num_arrays * PAGE_SIZE * shape.token_bytes
    return Memory(reading=used[False] * page_bytes, decoding=used[True] * page_bytes)


def compare(shape: Shape, num_prompt_tokens: int) -> tuple[LayerGroups, Memory, Memory]:
    """(the groups, memory with them, memory with one table for all layers)"""
    specs = shape.cache_specs
    groups = LayerGroups.of(specs, num_prompt_tokens + NUM_NEW_TOKENS)
    one_table = LayerGroups.of(
        [replace(spec, sliding_window=None) for spec in specs], num_prompt_tokens + NUM_NEW_TOKENS
    )
    return groups, measure(shape, groups, num_prompt_tokens), measure(shape, one_table, num_prompt_tokens)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32_768], help="of the prompt (4096 32768)")
    args = parser.parse_args(argv)
    print("| model | tokens | groups × layers | one table, MB | decoding, MB | of one table | reading, MB |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for shape in SHAPES:
        for num_tokens in args.tokens:
            groups, own, one_table = compare(shape, num_tokens)
            print(
                f"| {shape.name} | {num_tokens:,} | {groups.num_groups} × {groups.num_arrays} "
                f"| {one_table.decoding / 1e6:,.1f} | {own.decoding / 1e6:,.1f} "
                f"| {own.decoding / one_table.decoding:.0%} | {own.reading / 1e6:,.1f} |"
            )


if __name__ == "__main__":
    main()
