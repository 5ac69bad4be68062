"""How large the GPU kernels' blocks are: as many keys and stages as a multiprocessor's shared memory has room for."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.pallas_kernels.ragged_paged_attention import gpu_card
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_results import OUT_COLUMNS, PART_COLUMNS
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import ROWS

SM_BYTES = 228 << 10  # Shared memory of Hopper's multiprocessors,
RESERVED_BYTES = 1 << 10  # of which each thread block loses some to CUDA, and some to barriers.
BARRIER_BYTES = 512
MAX_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Of one kernel."""

    keys: int  # In a block.
    stages: int  # Blocks of keys and values on their way or at hand.
    wide_stages: int  # Keys or values of a block that are converted to 16 bits, where they have 8; else 0.
    thread_blocks: int
    weights_in_registers: bool = True  # Whence the matrix unit takes them; a simulated GPU's cannot.


def packed(head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype) -> Blocks:
    """Two thread blocks on a multiprocessor, or one where a head is so large that it keeps enough in flight."""
    keys, per_sm = (64, 1) if head_dim > 128 else (8192 // head_dim, 2)
    return _fill(keys, per_sm, ROWS * head_dim * q_dtype.itemsize, 2, head_dim, q_dtype, kv_dtype)


def tiles(head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype) -> Blocks:
    """One thread block on a multiprocessor: two warpgroups that compute take most of the registers."""
    keys = 64 if head_dim > 128 else 128
    # Queries, and results on their way: `gpu_results`.
    fixed = 2 * ROWS * ((head_dim + OUT_COLUMNS) * q_dtype.itemsize + PART_COLUMNS * 4 + 4)
    # While keys are in use by both warpgroups, and then their values, the next keys are made for the first of them.
    return _fill(keys, 1, fixed, 3, head_dim, q_dtype, kv_dtype)


def _fill(
    keys: int, per_sm: int, fixed: int, wide_stages: int, head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> Blocks:
    if kv_dtype == q_dtype:
        wide_stages = 0
    fixed += wide_stages * keys * head_dim * q_dtype.itemsize
    free = SM_BYTES // per_sm - RESERVED_BYTES - BARRIER_BYTES - fixed
    stages = min(free // (2 * keys * head_dim * kv_dtype.itemsize), MAX_STAGES)
    return Blocks(keys=keys, stages=stages, wide_stages=wide_stages, thread_blocks=per_sm * gpu_card.num_sms())
