"""Keys and values on their way from their pages to the matrix unit."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import ROWS, Ref
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import Visible

TILE_COLUMNS = 64
# Of what goes through registers. A thread has eight columns of a row: it reads 8 or 16 bytes, and writes 16, at a time.
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((16, TILE_COLUMNS), (4, TILE_COLUMNS), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def tiled(shape: tuple[int, ...], dtype: Any, columns: int = TILE_COLUMNS) -> Any:
    """Shared memory for matrices that the matrix unit reads, or in that form: swizzled tiles of 8 rows."""
    swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))  # type: ignore[abstract]


class Limits(NamedTuple):
    """The rows of a block of keys that some token sees: `low` to `high`, the latter not included."""

    low: Array
    high: Array

    @classmethod
    def of(cls, visible: Visible, block: Array, block_len: int) -> "Limits":
        return cls(visible.low - block * block_len, visible.high - block * block_len)

    def leave_out_some(self, block_len: int) -> Array:
        return (self.low > 0) | (self.high < block_len)


class KVBlocks(NamedTuple):
    """Blocks of keys and values that are being fetched. A stage has the keys of a block, or its values."""

    pages: Ref  # [pages, 2K, page_size, H]
    page_table: Ref  # int32 [S, P]
    smem: Ref  # [stages, block, H]
    barriers: Ref  # [stages], of `arrivals`

    @staticmethod
    def arrivals(block_len: int, page_size: int) -> int:
        """Copies that a stage takes."""
        return max(block_len // page_size, 1)

    @property
    def num_heads(self) -> int:
        """K. The values of a KV head are head K + `kv_head` of a page."""
        return self.pages.shape[1] // 2

    def find(self, seq: Array, visible: Visible, block: Array) -> list[Array]:
        """The pages of a block. Instead of one that no token sees, another one."""
        block_len, page_size = self.smem.shape[1], self.pages.shape[2]
        low, high = visible.low // page_size, (visible.high - 1) // page_size
        first = block * block_len // page_size
        return [
            self.page_table[seq, jnp.clip(first + i, low, high)] for i in range(self.arrivals(block_len, page_size))
        ]

    def fetch(self, pages: list[Array], head: Array, block: Array, stage: Array, barrier: Ref = None) -> None:
        """Starts to copy a head of a block from its pages. `barrier`: another one than the stage's."""
        page_size, rows = self.pages.shape[2], self.smem.shape[1] // len(pages)
        for i, page in enumerate(pages):
            source = self.pages.at[page, head]
            if rows < page_size:
                source = source.at[pl.ds(lax.rem(block, page_size // rows) * rows, rows)]
            target = self.smem.at[stage, pl.ds(i * rows, rows)]
            plgpu.copy_gmem_to_smem(source, target, self.barriers.at[stage] if barrier is None else barrier)

    def wait(self, stage: Array) -> Ref:
        """[block, H]"""
        plgpu.barrier_wait(self.barriers.at[stage])
        return self.smem.at[stage]


def convert(source: Ref, target: Ref) -> None:
    """Copies a block of 8 bits, [block, H], to one of 16, exactly. By one warpgroup, which sees it then."""
    for part in _parts(source.shape):
        x = plgpu.layout_cast(plgpu.load(source.at[part]), LAYOUT)
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(jnp.float16)
        target[part] = x.astype(target.dtype)
    plgpu.commit_smem()


def clear(block: Ref, limits: Limits) -> None:
    """Zeros in the rows of a block of 16 bits, [block, H], that nobody sees: whatever lies in an unwritten slot, NaN
    included, has a weight of zero. By one warpgroup."""
    for part in _parts(block.shape):
        x = plgpu.layout_cast(plgpu.load(block.at[part]), LAYOUT)
        row = part[0].start + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=LAYOUT.reduce(1))
        row = lax.broadcast_in_dim(row, x.shape, [0])
        block[part] = jnp.where((row >= limits.low) & (row < limits.high), x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _parts(shape: tuple[int, int]) -> list[tuple[pl.Slice, pl.Slice]]:
    """A matrix in pieces that fit into registers."""
    return [
        (pl.ds(row, ROWS), pl.ds(column, TILE_COLUMNS))
        for row in range(0, shape[0], ROWS)
        for column in range(0, shape[1], TILE_COLUMNS)
    ]
