"""The GPU kernel that writes new keys and values into their pages."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import Ref
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import StepRows

MAX_SMEM_BYTES = 32 << 10  # Of keys and values that are on their way.


def slots_of_tokens(rows: StepRows, num_tokens: int, pages: Ref) -> Array:
    """Where each token of the step belongs: page * page_size + its place there, int32 [T]; -1 for padding."""
    (S, P), page_size = rows.page_table_SP.shape, pages.shape[2]
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    seq_T = jnp.searchsorted(rows.cu_q_lens[1:], token_T, side="right", method="compare_all")
    seq_T = jnp.minimum(seq_T, S - 1)
    position_T = rows.kv_lens_S[seq_T] - rows.cu_q_lens[seq_T + 1] + token_T
    page_T = rows.page_table_SP[seq_T, jnp.clip(position_T // page_size, 0, P - 1)]
    is_real_T = token_T < rows.cu_q_lens[rows.num_seqs[0]]
    return jnp.where(is_real_T, page_T * page_size + position_T % page_size, -1)


def write(kv_T2KH: Array, slots_T: Array, pages: Ref, out_type: jax.ShapeDtypeStruct) -> Array:
    """Copies keys and values, by head, to their slots in the pages [pages, 2K, page_size, H], which are a reference.

    Returns:
      What the outputs [T, N, H] begin as: zero in padding tokens, and anything in others.
    """
    num_tokens, num_kv_heads, head_dim = kv_T2KH.shape
    page_size, num_heads = pages.shape[2], out_type.shape[1]
    most = max(MAX_SMEM_BYTES // (num_kv_heads * head_dim * kv_T2KH.dtype.itemsize), 1)
    tile = max(size for size in range(1, min(most, num_tokens) + 1) if num_tokens % size == 0)

    def kernel(kv: Ref, slots: Ref, pages: Ref, out: Ref, kv_smem: Ref, zeros: Ref, barrier: Ref) -> None:
        first = lax.axis_index("block") * tile
        plgpu.copy_gmem_to_smem(kv.at[pl.ds(first, tile)], kv_smem, barrier)
        zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(barrier)

        def one(i: Array, _: None) -> None:
            slot = slots[first + i]

            @pl.when(slot >= 0)
            def write() -> None:
                plgpu.copy_smem_to_gmem(kv_smem.at[i], pages.at[slot // page_size, :, lax.rem(slot, page_size)])

            @pl.when(slot < 0)
            def pad() -> None:
                plgpu.copy_smem_to_gmem(zeros.at[pl.ds(0, num_heads)], out.at[first + i])

        lax.fori_loop(0, tile, one, None)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((tile, num_kv_heads, head_dim), kv_T2KH.dtype),
            # Eight elements for each thread, or a multiple of that.
            plgpu.SMEM((-(-num_heads // 16) * 16, head_dim), out_type.dtype),
            plgpu.Barrier(),
        ],
        grid=(num_tokens // tile,),
        grid_names=("block",),
        kernel_name="paged_attention_write",
    )(kv_T2KH, slots_T, pages)
