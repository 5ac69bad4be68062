"""How keys, values and queries lie in a TPU's memory for the kernel of `tpu.py`.

The matrix unit takes operands in vector registers of 8 sublanes x 128 lanes of 32 bits, where a sublane holds `pack`
consecutive rows of a narrower dtype. Pages are head-major, [page, tile, slot, lane]: the keys of one head in one page
are whole registers that go to the matrix unit as they are, without a shuffle.

Heads of at most 64 share the 128 lanes of a tile, two by two, so that no lane is fetched for nothing. A query is laid
into its half of the lanes, with zeros in the other, and the queries of both heads are rows of one product. The odd
head of an odd number shares its tile with its own values. So the kernel sees one form for all: a *tile head* has one
tile of keys, one of values, and `rows_per_token` queries for each token.
"""

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax import Array

NUM_LANES = 128
NUM_SUBLANES = 8
HALF = NUM_LANES // 2


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The static shapes of one attention layer. `q_dtype` and `kv_dtype` are the caller's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype

    @cached_property
    def heads_per_tile(self) -> int:
        return 2 if self.head_dim <= HALF else 1

    @cached_property
    def lanes(self) -> int:
        return round_up(self.head_dim, NUM_LANES)

    @cached_property
    def folds(self) -> int:
        """Registers that a row of `lanes` spans."""
        return self.lanes // NUM_LANES

    @cached_property
    def num_tiles(self) -> int:
        return self.num_kv_heads * 2 // self.heads_per_tile

    @cached_property
    def num_tile_heads(self) -> int:
        return -(-self.num_tiles // 2)

    def value_tile(self, tile_head: Array | int) -> Array | int:
        """The tile of a tile head's values; its keys are in tile `tile_head`."""
        if self.num_tiles % 2 == 0:
            return self.num_tile_heads + tile_head
        last = self.num_tile_heads - 1
        return jnp.where(tile_head == last, last, self.num_tile_heads + tile_head)

    @cached_property
    def dot_dtype(self) -> jnp.dtype:
        """Operands of the products: bfloat16, unless the cache is float32."""
        return jnp.dtype(jnp.float32 if self.kv_dtype == jnp.float32 else jnp.bfloat16)

    # Queries and outputs: [T, q_rows, lanes], tile head by tile head.

    @cached_property
    def rows_per_token(self) -> int:
        """Query rows of a token in one tile head."""
        return self.num_heads // self.num_kv_heads * self.heads_per_tile

    @cached_property
    def q_pack(self) -> int:
        """Rows in a word of 32 bits. Two that share a word belong to one tile head, hence 1 if these are odd."""
        is_narrow = self.q_dtype == jnp.bfloat16 and self.dot_dtype == jnp.bfloat16
        return 2 if is_narrow and self.rows_per_token % 2 == 0 else 1

    @cached_property
    def io_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.bfloat16 if self.q_pack == 2 else jnp.float32)

    @cached_property
    def q_rows(self) -> int:
        return round_up(self.num_tile_heads * self.rows_per_token, NUM_SUBLANES * self.q_pack)

    @cached_property
    def words_per_tile_head(self) -> int:
        return self.rows_per_token // self.q_pack

    # Pages, and new keys and values: [T, kv_rows, lanes], a row for each tile.

    @cached_property
    def kv_pack(self) -> int:
        return 4 // self.kv_dtype.itemsize

    @cached_property
    def group(self) -> int:
        """Slots that one register holds: the unit in which pages are written."""
        return NUM_SUBLANES * self.kv_pack

    @cached_property
    def kv_rows(self) -> int:
        return round_up(self.num_tiles, NUM_SUBLANES * self.kv_pack)

    @cached_property
    def page_shape(self) -> tuple[int, int, int]:
        return (self.num_tiles, self.page_size, self.lanes)

    @cached_property
    def token_bytes(self) -> int:
        return self.num_tiles * self.lanes * self.kv_dtype.itemsize

    # What XLA does before and after the kernel.

    def tiles(self, k_XKH: Array, v_XKH: Array) -> Array:
        """[..., K, H] twice -> [..., tiles, lanes]."""
        if self.heads_per_tile == 1:
            return _pad(jnp.concatenate([k_XKH, v_XKH], -2), -1, self.lanes)
        k_XKH, v_XKH = _pad(k_XKH, -1, HALF), _pad(v_XKH, -1, HALF)
        paired = self.num_kv_heads // 2 * 2
        shape = (*k_XKH.shape[:-2], paired // 2, NUM_LANES)
        parts = [k_XKH[..., :paired, :].reshape(shape), v_XKH[..., :paired, :].reshape(shape)]
        if self.num_kv_heads % 2:
            parts.insert(1, jnp.concatenate([k_XKH[..., paired:, :], v_XKH[..., paired:, :]], -1))
        return jnp.concatenate(parts, -2)

    def heads(self, tiles: Array) -> tuple[Array, Array]:
        """The inverse of `tiles`."""
        K, H = self.num_kv_heads, self.head_dim
        if self.heads_per_tile == 1:
            return tiles[..., :K, :H], tiles[..., K:, :H]
        pairs = K // 2
        shape = (*tiles.shape[:-2], 2 * pairs, HALF)
        k, v = [tiles[..., :pairs, :].reshape(shape)], [tiles[..., K - pairs :, :].reshape(shape)]
        if K % 2:
            k.append(tiles[..., pairs : pairs + 1, :HALF])
            v.append(tiles[..., pairs : pairs + 1, HALF:])
        return jnp.concatenate(k, -2)[..., :H], jnp.concatenate(v, -2)[..., :H]

    def rows(self, q_TNH: Array) -> Array:
        """Queries [T, N, H] -> [T, q_rows, lanes] in `io_dtype`."""
        rows = q_TNH.astype(self.io_dtype)
        if self.heads_per_tile == 2:
            rows = _pad(rows, -1, HALF)
            zeros = jnp.zeros_like(rows)
            first, second = jnp.concatenate([rows, zeros], -1), jnp.concatenate([zeros, rows], -1)
            rows = jnp.where(self._is_second_of_tile()[:, None], second, first)
        return _pad(_pad(rows, -1, self.lanes), -2, self.q_rows)

    def out_heads(self, rows: Array) -> Array:
        """Outputs [T, q_rows, lanes] -> [T, N, H] in the queries' dtype."""
        out = rows[:, : self.num_heads]
        if self.heads_per_tile == 2:
            is_upper = self._is_second_of_tile()
            if self.num_kv_heads % 2:  # The odd head's values are in the upper half, where its queries are not.
                is_upper |= jnp.arange(self.num_heads) >= self.num_heads - self.num_heads // self.num_kv_heads
            out = jnp.where(is_upper[:, None], out[..., HALF:], out[..., :HALF])
        return out[..., : self.head_dim].astype(self.q_dtype)

    def _is_second_of_tile(self) -> Array:
        """bool [N]: whether a query head's KV head has the upper half of its tile."""
        return jnp.arange(self.num_heads) // (self.num_heads // self.num_kv_heads) % 2 == 1

    def new_rows(self, tiles: Array) -> Array:
        """New keys and values [T, tiles, lanes] -> [T, kv_rows, lanes]."""
        return _pad(tiles, -2, self.kv_rows)

    def sinks(self, sinks_N: Array) -> Array:
        """[N] -> float32 [tile heads, rows_per_token]."""
        rows = _pad(sinks_N.astype(jnp.float32), -1, self.num_tile_heads * self.rows_per_token)
        return rows.reshape(self.num_tile_heads, self.rows_per_token)


def _pad(x: Array, axis: int, size: int) -> Array:
    """Zeros after the end of an axis."""
    if x.shape[axis] == size:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, padding)
