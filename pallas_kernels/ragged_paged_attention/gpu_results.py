"""Results of the GPU kernels on their way from registers to memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_keys import tiled
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import ROWS, Ref, State, scale_rows
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import SLOTS_PER_BLOCK

OUT_COLUMNS, PART_COLUMNS = 64, 32  # 128 bytes.


class Parts(NamedTuple):
    """In the GPU's memory: what thread blocks found of units that they share with others."""

    values: Any  # float32 [slots, rows, H]
    weights: Any  # float32 [slots, rows], logarithms of base 2

    @classmethod
    def types(cls, num_thread_blocks: int, num_rows: int, head_dim: int) -> "Parts":
        num_slots = SLOTS_PER_BLOCK * num_thread_blocks
        return cls(
            values=jax.ShapeDtypeStruct((num_slots, num_rows, head_dim), jnp.float32),
            weights=jax.ShapeDtypeStruct((num_slots, num_rows), jnp.float32),
        )


class Results(NamedTuple):
    """Shared memory of one warpgroup: some columns at a time are there on their way."""

    out: Any  # [ROWS, OUT_COLUMNS]; in no tiles, so that any rows can leave alone
    values: Any  # float32 [ROWS, PART_COLUMNS]
    weights: Any  # float32 [ROWS]

    @classmethod
    def types(cls, dtype: jnp.dtype, warpgroups: tuple[int, ...] = ()) -> "Results":
        """`warpgroups`: how many, on an axis before the others."""
        return cls(
            out=plgpu.SMEM((*warpgroups, ROWS, OUT_COLUMNS), dtype),
            values=tiled((*warpgroups, ROWS, PART_COLUMNS), jnp.float32, PART_COLUMNS),
            weights=plgpu.SMEM((*warpgroups, ROWS), jnp.float32),
        )

    def send(self, acc: Array, factor: Array, copy: Callable[[Ref, pl.Slice], None]) -> None:
        """Float32 [ROWS, H] times [ROWS], in the dtype of `out`, goes wherever `copy(smem, columns)` copies it."""
        for column in range(0, acc.shape[1], OUT_COLUMNS):
            if column:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns = scale_rows(acc[:, column : column + OUT_COLUMNS], factor)
            self.out[...] = columns.astype(self.out.dtype)
            plgpu.commit_smem()
            copy(self.out, pl.ds(column, OUT_COLUMNS))

    def send_part(self, state: State, parts: Parts, slot: Array, first_row: Array | int, num_rows: int) -> None:
        """What `gpu_combine` needs goes to a slot; the first of `num_rows` rows to `first_row` there."""
        factor, weights = state.part()
        rows = pl.ds(first_row, num_rows)
        self.weights[...] = weights
        for column in range(0, state.acc.shape[1], PART_COLUMNS):
            if column:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.values[...] = scale_rows(state.acc[:, column : column + PART_COLUMNS], factor)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.values.at[pl.ds(0, num_rows)], parts.values.at[slot, rows, pl.ds(column, PART_COLUMNS)]
            )
        plgpu.copy_smem_to_gmem(self.weights.at[pl.ds(0, num_rows)], parts.weights.at[slot, rows])
