"""JAX's own ragged paged attention, `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, to compare with.

It only reads the cache: writing new K and V is another kernel's work there. It has one pair of block sizes for decodes
and prompts alike; here each kind of step gets those that suit it best, its tuned table's among them.
"""

from collections import Counter
from functools import partial
from typing import Any

from benchmarks.kernel_workload import Workload
from benchmarks.tpu.chips import CHIPS, Chip
from benchmarks.tpu.interpret import Counts, Trips

NAME = "jax"
FILE = __file__
Blocks = dict[str, int]


def block_choices(chip: str, workload: Workload) -> list[Blocks]:
    """Block sizes to try, of the range that its tuned table has.

    Its default (a block of 8,192 tokens or the whole context) is left out: for 4,096 tokens libtpu takes minutes for
    23,311 bundles, more for each MiB than with smaller blocks.
    """
    tokens, queries = ((256, 512, 1024), (8, 16, 32)) if workload.q_len == 1 else ((512, 1024), (32, 64, 128))
    return [
        {"pages": min(t // workload.page_size, workload.pages_per_seq), "queries": min(q, workload.num_tokens)}
        for t in tokens
        for q in queries
    ]


def build(chip: str, workload: dict[str, Any], blocks: Blocks) -> tuple[Any, tuple]:
    """The call and its arguments, for `compile`."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    w = Workload(**workload)
    S, P = w.num_seqs, w.pages_per_seq
    shape = jax.ShapeDtypeStruct
    call = partial(
        ragged_paged_attention,
        sm_scale=w.head_dim**-0.5,
        num_kv_pages_per_block=blocks["pages"],
        num_queries_per_block=blocks["queries"],
        vmem_limit_bytes=CHIPS[chip].vmem_bytes * 9 // 10,
    )
    return call, (
        shape((w.num_tokens, w.num_heads, w.head_dim), jnp.bfloat16),
        shape((S * P + 1, w.page_size, 2 * w.num_kv_heads, w.head_dim), jnp.dtype(w.kv_dtype)),
        shape((S,), jnp.int32),
        shape((S, P), jnp.int32),
        shape((S + 1,), jnp.int32),
        shape((1,), jnp.int32),
    )


def counts(workload: Workload, blocks: Blocks) -> Counts:
    """What the kernel does, by its arguments: it uses `ref.reshape`, which interpret mode does not run.

    The grid goes over blocks of heads and of queries; then come the sequences of a block of queries, and the KV blocks
    of a sequence. Each block of queries fetches the KV of its sequences again, whole, also what causality hides.
    """
    num_heads_blocks, w = _num_heads_blocks(workload), workload
    grid = num_heads_blocks * -(-w.num_tokens // blocks["queries"])
    sequences = num_heads_blocks * w.num_seqs * max(1, w.q_len // blocks["queries"])
    fetches = num_heads_blocks * num_fetches(workload, blocks)
    kv_bytes = num_fetches(workload, blocks) * blocks["pages"] * w.page_size * w.token_kv_bytes
    q_bytes = 2 * w.num_tokens * w.num_heads * w.head_dim
    return Counts(
        dma_bytes=Counter({("hbm", "vmem"): kv_bytes + q_bytes, ("vmem", "hbm"): q_bytes}),
        num_dmas=Counter({("hbm", "vmem"): fetches * blocks["pages"] + grid, ("vmem", "hbm"): grid}),
        root=Trips(1, [Trips(grid, [Trips(sequences, [Trips(fetches)])])]),
    )


def num_fetches(workload: Workload, blocks: Blocks) -> int:
    """How many blocks of KV are fetched one after the other, for all heads."""
    tiles = workload.num_seqs * max(1, workload.q_len // blocks["queries"])
    return tiles * -(-workload.kv_len // (blocks["pages"] * workload.page_size))


def least_bytes(workload: Workload) -> int:
    """KV, queries and outputs once; it writes no KV."""
    return workload.kv_bytes + 2 * 2 * workload.num_tokens * workload.num_heads * workload.head_dim


def num_cores(chip: Chip, workload: Workload) -> int:
    """How many cores of a device work."""
    return 1


def matrix_roof(chip: Chip, workload: Workload) -> float:
    """The part of the matrix unit that products of such heads can use: scores contract over a head, values are one."""
    return chip.filled(workload.head_dim)


def _num_heads_blocks(workload: Workload) -> int:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    num_heads, _ = kernel.get_min_heads_per_blk(
        workload.num_heads, 2 * workload.num_kv_heads, jnp.dtype("bfloat16"), jnp.dtype(workload.kv_dtype)
    )
    return workload.num_heads // num_heads
