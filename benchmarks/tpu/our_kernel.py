"""Our own kernel, `jaxllm.pallas_kernels.ragged_paged_attention` with implementation "tpu", to be measured."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_workload import Workload
from benchmarks.tpu.chips import Chip
from benchmarks.tpu.interpret import Counts, count_each
from jaxllm.pallas_kernels.ragged_paged_attention import tpu, tpu_blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import NUM_LANES, Layout, round_up

NAME = "ours"
FILE = __file__
CACHE_BYTES = 1 << 30  # A smaller cache XLA may put into VMEM, where the kernel would not find it in service.
COUNTED_SEQS = 8  # So many sequences are interpreted; all are alike.
Blocks = dict[str, int]


def layout_of(w: Workload) -> Layout:
    return Layout(
        num_heads=w.num_heads,
        num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        page_size=w.page_size,
        q_dtype=jnp.dtype("bfloat16"),
        kv_dtype=jnp.dtype(w.kv_dtype),
    )


def block_choices(chip: str, workload: Workload) -> list[Blocks]:
    """What the kernel would take: its table, or its rule."""
    return [asdict(tpu_blocks.choose(layout_of(workload), chip))]


def build(chip: str, workload: dict[str, Any], blocks: Blocks) -> tuple[Any, tuple]:
    """The call and its arguments, for `compile`."""
    w = Workload(**workload)
    S, P = w.num_seqs, w.pages_per_seq
    num_pages = max(S * P + 1, CACHE_BYTES // (w.page_size * w.token_kv_bytes))
    return jax.jit(_call(w, blocks), donate_argnums=3), _arguments(w, S, w.num_tokens, P, num_pages)


def counts(workload: Workload, blocks: Blocks) -> Counts:
    """What the kernel does for the workload, by running it in interpret mode."""
    (found,) = counts_each([workload], blocks)
    return found


def counts_each(workloads: Sequence[Workload], blocks: Blocks) -> list[Counts]:
    """The same for workloads of the same kind, heads and cache, traced once: quicker than one by one."""
    few = [replace(w, num_seqs=min(w.num_seqs, COUNTED_SEQS)) for w in workloads]
    S, T, P = (max(getattr(w, name) for w in few) for name in ("num_seqs", "num_tokens", "pages_per_seq"))
    arrays = [jnp.zeros(a.shape, a.dtype) for a in _arguments(few[0], S, T, P, S * P + 1)[:4]]
    table = 1 + np.random.default_rng(0).permutation(S * P).astype(np.int32).reshape(S, P)
    calls = []
    for w in few:
        kv_lens_S = np.where(np.arange(S) < w.num_seqs, w.kv_len, 0)
        cu_q_lens = w.q_len * np.minimum(np.arange(S + 1), w.num_seqs)
        rows = kv_lens_S, table, cu_q_lens, np.array([w.num_seqs])
        calls.append([*arrays, *(jnp.asarray(row, jnp.int32) for row in rows)])
    found = count_each(_call(few[0], blocks), calls)
    for workload, w, counts in zip(workloads, few, found, strict=True):
        factor = workload.num_seqs / w.num_seqs
        counts.root.loops = [loop.times(factor) for loop in counts.root.loops]
        for counter in (counts.dma_bytes, counts.num_dmas):
            for route in counter:
                counter[route] *= factor
    return found


def num_fetches(workload: Workload, blocks: Blocks) -> int:
    """How many blocks of KV are fetched one after the other."""
    if workload.q_len == 1:
        return workload.num_seqs * -(-workload.kv_len // blocks["decode_fetch"])
    first = workload.kv_len - workload.q_len
    tiles = range(first, workload.kv_len, blocks["chunk_queries"])
    ends = (min(tile + blocks["chunk_queries"], workload.kv_len) for tile in tiles)
    return workload.num_seqs * sum(-(-end // blocks["chunk_fetch"]) for end in ends)


def least_bytes(workload: Workload) -> int:
    return workload.least_bytes


def num_cores(chip: Chip, workload: Workload) -> int:
    """How many cores of a device work: rows are dealt out to all."""
    return min(chip.cores, workload.num_seqs)


def matrix_roof(chip: Chip, workload: Workload) -> float:
    """The part of the matrix unit that products of such heads can use.

    Scores contract over a tile's lanes. Values contract over keys and have queries as columns, as many as fill the
    unit; of a tile's lanes, which are rows there, those of the other head, or of padding, are for nothing.
    """
    lanes = round_up(workload.head_dim, NUM_LANES)
    scores, values = chip.filled(lanes) * workload.head_dim / lanes, workload.head_dim / lanes
    return 2 / (1 / scores + 1 / values)


def _call(w: Workload, blocks: Blocks) -> Any:
    return partial(
        tpu.ragged_paged_attention,
        sm_scale=w.head_dim**-0.5,
        sliding_window=None,
        soft_cap=None,
        sinks_N=None,
        k_scale_K=None,
        v_scale_K=None,
        decode_only=w.q_len == 1,
        blocks=tpu_blocks.Blocks(**blocks),
    )


def _arguments(w: Workload, S: int, T: int, P: int, num_pages: int) -> tuple:
    shape = jax.ShapeDtypeStruct
    kv_dtype = jnp.dtype(w.kv_dtype)
    new = shape((T, w.num_kv_heads, w.head_dim), jnp.bfloat16)
    return (
        shape((T, w.num_heads, w.head_dim), jnp.bfloat16),
        new,
        new,
        shape(tpu.kv_cache_shape(num_pages, w.page_size, w.num_kv_heads, w.head_dim, kv_dtype), kv_dtype),
        shape((S,), jnp.int32),
        shape((S, P), jnp.int32),
        shape((S + 1,), jnp.int32),
        shape((1,), jnp.int32),
    )
