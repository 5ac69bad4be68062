"""Keys and values on their way from their pages to the matrix unit."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import ROWS, Ref
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import Visible

TILE_COLUMNS = 64


def tiled(shape: tuple[int, ...], dtype: Any, columns: int = TILE_COLUMNS) -> Any:
    """Shared memory for matrices that the matrix unit reads, or in that form: swizzled tiles of 8 rows."""
    swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))  # type: ignore[abstract]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVBlocks:
    """Blocks of keys and values of one row and KV head, several in flight.

    The matrix unit takes 16-bit operands. Those of 8 bits are converted in `wide`, and values that no token of a unit
    sees become zero there or where they are: whatever lies in an unwritten slot, NaN included, has a weight of zero.
    """

    pages: Ref  # [pages, 2K, page_size, H]
    page_table: Ref  # int32 [S, P]
    k_smem: Ref  # [stages, block, H] in the dtype of the pages
    v_smem: Ref
    k_barriers: Ref  # [stages], of `arrivals`
    v_barriers: Ref
    wide: tuple[Ref, Ref] | None  # Keys and values, [block, H] in the dtype of the queries. None if the pages' is that.

    @staticmethod
    def arrivals(block: int, page_size: int) -> int:
        """Copies that a block takes."""
        return max(block // page_size, 1)

    @property
    def block(self) -> int:
        return self.k_smem.shape[1]

    @property
    def num_stages(self) -> int:
        return self.k_smem.shape[0]

    def find(self, seq: Array, visible: Visible, block: Array) -> list[Array]:
        """The pages of a block. Instead of one that no token sees, another one."""
        page_size = self.pages.shape[2]
        num_copies = self.arrivals(self.block, page_size)
        low, high = visible.low // page_size, (visible.high - 1) // page_size
        first = block * self.block // page_size
        return [self.page_table[seq, jnp.clip(first + i, low, high)] for i in range(num_copies)]

    def fetch_keys(self, pages: list[Array], kv_head: Array, block: Array, stage: Array) -> None:
        """Starts to copy the keys of a block from the pages that `find` has given."""
        self._fetch(pages, kv_head, block, self.k_smem.at[stage], self.k_barriers.at[stage])

    def fetch_values(self, pages: list[Array], kv_head: Array, block: Array, stage: Array) -> None:
        head = self.pages.shape[1] // 2 + kv_head
        self._fetch(pages, head, block, self.v_smem.at[stage], self.v_barriers.at[stage])

    def _fetch(self, pages: list[Array], head: Array, block: Array, smem: Ref, barrier: Ref) -> None:
        page_size, rows = self.pages.shape[2], self.block // len(pages)
        for i, page in enumerate(pages):
            source = self.pages.at[page, head]
            if rows < page_size:
                source = source.at[pl.ds(lax.rem(block, page_size // rows) * rows, rows)]
            plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(i * rows, rows)], barrier)

    def keys(self, stage: Array, group: "Warpgroup") -> Ref:
        """Waits for the keys of a block. [block, H]"""
        plgpu.barrier_wait(self.k_barriers.at[stage])
        if self.wide is None:
            return self.k_smem.at[stage]
        self._convert(self.k_smem.at[stage], self.wide[0], None, group)
        return self.wide[0]

    def values(self, stage: Array, block: Array, visible: Visible | None, group: "Warpgroup") -> Ref:
        """Waits for the values of a block. [block, H]; those that are not visible are zero, if `visible` is given."""
        plgpu.barrier_wait(self.v_barriers.at[stage])
        v_smem = self.v_smem.at[stage]
        limits = None
        if visible is not None:
            first_key = block * self.block
            limits = (visible.low - first_key, visible.high - first_key)
        if self.wide is not None:
            self._convert(v_smem, self.wide[1], limits, group)
            return self.wide[1]
        if limits is not None:
            low, high = limits

            @pl.when((low > 0) | (high < self.block))
            def _() -> None:
                self._convert(v_smem, v_smem, limits, group)

        return v_smem

    def _convert(self, source: Ref, target: Ref, limits: tuple[Array, Array] | None, group: "Warpgroup") -> None:
        """source [block, H] -> target, rows outside `limits` zero. Each warpgroup does its share, and waits for all."""
        if target is not source:
            group.meet()  # Others may still read the block before.
        for part in group.parts(source.shape):
            x = plgpu.layout_cast(plgpu.load(source.at[part]), plgpu.Layout.WGMMA)
            if limits is not None:
                first_row = part[0].start
                row = first_row + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
                is_visible = (row >= limits[0]) & (row < limits[1])
            if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
                x = x.astype(jnp.float16)  # Exact.
            x = x.astype(target.dtype)
            target[part] = x if limits is None else jnp.where(is_visible, x, jnp.zeros_like(x))
        plgpu.commit_smem()
        group.meet()


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """One of several that compute with the same blocks of keys."""

    index: Any  # 0 for the only one.
    barrier: Ref | None  # On which all of them arrive; None for one alone.
    count: int = 1

    def meet(self) -> None:
        if self.barrier is not None:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)

    def parts(self, shape: tuple[int, int]) -> list[tuple[pl.Slice, pl.Slice]]:
        """This one's share of a matrix, in pieces that fit into registers."""
        rows, columns = shape
        if rows >= self.count * ROWS:
            first_row, num_rows, first_column, num_columns = (
                self.index * (rows // self.count),
                rows // self.count,
                0,
                columns,
            )
        else:
            first_row, num_rows, first_column, num_columns = (
                0,
                rows,
                self.index * (columns // self.count),
                columns // self.count,
            )
        return [
            (pl.ds(first_row + r, ROWS), pl.ds(first_column + c, TILE_COLUMNS))
            for r in range(0, num_rows, ROWS)
            for c in range(0, num_columns, TILE_COLUMNS)
        ]
