"""How much of the work the TPU kernel takes at a time: tokens of a fetch, of a product, of a tile of queries."""

import dataclasses

from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, NUM_SUBLANES, Layout, round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """All in tokens, and powers of two.

    decode_fetch, chunk_fetch: KV that one fetch brings, of which two are in VMEM: whole pages.
    decode_tokens, chunk_tokens: KV of one product, at most what a fetch brings; at least 128.
    chunk_queries: queries of a tile.
    """

    decode_fetch: int
    decode_tokens: int
    chunk_fetch: int
    chunk_tokens: int
    chunk_queries: int


FETCH_BYTES = 2 << 20  # A microsecond or so of the memory's time, which hides what a fetch costs to begin.
SCORE_REGISTERS = 32  # Of the 64: the scores of all heads against one product's tokens, in decode.


def choose(layout: Layout) -> Blocks:
    """The rule for where the table has no row."""
    registers = layout.num_tile_heads * (round_up(layout.rows_per_token, NUM_SUBLANES) // NUM_SUBLANES)
    decode_tokens = max(NUM_LANES, _power_of_two(SCORE_REGISTERS // registers) * NUM_LANES)
    fetch = _power_of_two(FETCH_BYTES // layout.token_bytes)
    decode_tokens = min(decode_tokens, max(NUM_LANES, fetch))
    return Blocks(
        decode_fetch=max(fetch, decode_tokens, layout.page_size),
        decode_tokens=decode_tokens,
        chunk_fetch=max(1024, layout.page_size),
        chunk_tokens=256,
        chunk_queries=_chunk_queries(layout.rows_per_token),
    )


def _chunk_queries(rows_per_token: int) -> int:
    """Tokens whose rows fill registers of 128 lanes, and are about 512."""
    queries = max(NUM_LANES // (rows_per_token & -rows_per_token), 1)
    while queries * 2 * rows_per_token <= 512:
        queries *= 2
    return queries


def _power_of_two(x: int) -> int:
    """The largest power of two that is not above x, at least 1."""
    return 1 << max(0, x.bit_length() - 1)
