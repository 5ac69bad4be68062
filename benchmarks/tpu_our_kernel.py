"""Our own kernel, `jaxllm.pallas_kernels.ragged_paged_attention` with implementation "tpu", to be measured."""

from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from tpu_interpret import Counts, count
from tpu_workload import Workload

from jaxllm.pallas_kernels.ragged_paged_attention import tpu, tpu_blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import Layout

NAME = "ours"
FILE = __file__
CACHE_BYTES = 1 << 30  # A smaller cache XLA may put into VMEM, where the kernel would not find it in service.
COUNTED_SEQS = 16  # So many sequences are interpreted; all are alike.
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
    return [asdict(tpu_blocks.choose(layout_of(workload)))]


def build(chip: str, workload: dict[str, Any], blocks: Blocks) -> tuple[Any, tuple]:
    """The call and its arguments, for `tpu_compile`."""
    w = Workload(**workload)
    num_pages = max(w.num_seqs * w.pages_per_seq + 1, CACHE_BYTES // (w.page_size * w.token_kv_bytes))
    return jax.jit(_call(w, blocks), donate_argnums=3), _arguments(w, num_pages)


def counts(workload: Workload, blocks: Blocks) -> Counts:
    """What the kernel does for the workload, by running it in interpret mode."""
    few = replace(workload, num_seqs=min(workload.num_seqs, COUNTED_SEQS))
    S, P = few.num_seqs, few.pages_per_seq
    arrays = [jnp.zeros(a.shape, a.dtype) for a in _arguments(few, S * P + 1)[:4]]
    table = 1 + np.random.default_rng(0).permutation(S * P).astype(np.int32).reshape(S, P)
    lengths = np.full(S, few.kv_len, np.int32), table, few.q_len * np.arange(S + 1, dtype=np.int32), np.int32([S])
    found = count(_call(few, blocks), *arrays, *map(jnp.asarray, lengths))
    factor = workload.num_seqs / few.num_seqs
    found.root.loops = [loop.times(factor) for loop in found.root.loops]
    for counter in (found.dma_bytes, found.num_dmas):
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


def _call(w: Workload, blocks: Blocks) -> Any:
    attend = partial(
        tpu.ragged_paged_attention,
        sm_scale=w.head_dim**-0.5,
        sliding_window=None,
        soft_cap=None,
        sinks_N=None,
        k_scale_K=None,
        v_scale_K=None,
        decode_only=w.q_len == 1,
    )

    def call(*arrays: jax.Array) -> Any:
        with patch.object(tpu_blocks, "choose", return_value=tpu_blocks.Blocks(**blocks)):
            return attend(*arrays)

    return call


def _arguments(w: Workload, num_pages: int) -> tuple:
    S, P = w.num_seqs, w.pages_per_seq
    shape = jax.ShapeDtypeStruct
    kv_dtype = jnp.dtype(w.kv_dtype)
    new = shape((w.num_tokens, w.num_kv_heads, w.head_dim), jnp.bfloat16)
    return (
        shape((w.num_tokens, w.num_heads, w.head_dim), jnp.bfloat16),
        new,
        new,
        shape(tpu.kv_cache_shape(num_pages, w.page_size, w.num_kv_heads, w.head_dim, kv_dtype), kv_dtype),
        shape((S,), jnp.int32),
        shape((S, P), jnp.int32),
        shape((S + 1,), jnp.int32),
        shape((1,), jnp.int32),
    )
