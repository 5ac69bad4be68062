"""How keys, values and queries lie in a TPU's memory for the kernel of `tpu.py`.

The matrix unit takes operands in vector registers of 8 sublanes x 128 lanes of 32 bits, where a sublane holds `pack`
consecutive rows of a narrower dtype. Pages are head-major, [page, tile, slot, lane]: the keys of one head in one page
are whole registers that go to the matrix unit as they are, without a shuffle.

Three facts are hidden here, so that the kernel sees one form:

* Heads of at most 64 share the 128 lanes of a tile, two by two, so that no lane is fetched for nothing. Queries are
  laid into their half of the lanes, with zeros in the other, and both heads are rows of one product. The odd head
  of an odd number shares its tile with its own values.
* Key tiles come first and value tiles last, in reverse: tile head h has its keys in tile h and its values in tile
  `num_tiles - 1 - h`, which is one and the same tile for the odd head.
* Queries, outputs and new keys and values go in and out as words of 32 bits, `pack` heads of one token in a word:
  a strided load of words gives one head's rows of many tokens, and tokens may begin anywhere.
"""

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax import Array, lax

NUM_LANES = 128
NUM_SUBLANES = 8


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
        return 2 if self.head_dim <= 64 else 1

    @cached_property
    def lanes(self) -> int:
        return round_up(self.head_dim * self.heads_per_tile, NUM_LANES)

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

    @cached_property
    def rows_per_token(self) -> int:
        """Query rows of a token in one tile head."""
        return self.num_heads // self.num_kv_heads * self.heads_per_tile

    @cached_property
    def dot_dtype(self) -> jnp.dtype:
        """Operands of the products: bfloat16, unless the cache is float32."""
        return jnp.dtype(jnp.float32 if self.kv_dtype == jnp.float32 else jnp.bfloat16)

    # Words of queries and outputs.

    @cached_property
    def q_pack(self) -> int:
        return (
            2 if self.q_dtype == jnp.bfloat16 and self.dot_dtype == jnp.bfloat16 and not self.rows_per_token % 2 else 1
        )

    @cached_property
    def words_per_tile_head(self) -> int:
        return self.rows_per_token // self.q_pack

    @cached_property
    def q_words(self) -> int:
        """Rows of words that a token has in one fold, padded to whole registers."""
        return round_up(self.num_tile_heads * self.words_per_tile_head, NUM_SUBLANES)

    @cached_property
    def q_stride(self) -> int:
        """Rows of words from one token to the next."""
        return self.folds * self.q_words

    # Words of new keys and values.

    @cached_property
    def kv_pack(self) -> int:
        return 4 // self.kv_dtype.itemsize

    @cached_property
    def group(self) -> int:
        """Slots that one register holds: the unit in which pages are written."""
        return NUM_SUBLANES * self.kv_pack

    @cached_property
    def kv_words(self) -> int:
        return -(-self.num_tiles // self.kv_pack)

    @cached_property
    def kv_stride(self) -> int:
        return round_up(self.folds * self.kv_words, NUM_SUBLANES)

    @cached_property
    def page_shape(self) -> tuple[int, int, int]:
        return (self.num_tiles, self.page_size, self.lanes)

    @cached_property
    def page_bytes(self) -> int:
        return self.num_tiles * self.page_size * self.lanes * self.kv_dtype.itemsize

    # What XLA does before and after the kernel.

    def tiles(self, k_XKH: Array, v_XKH: Array) -> Array:
        """[..., K, H] twice -> [..., tiles, lanes]."""
        if self.heads_per_tile == 1:
            return _pad_last(jnp.concatenate([k_XKH, jnp.flip(v_XKH, -2)], -2), self.lanes)
        k_XKH, v_XKH = _pad_last(k_XKH, NUM_LANES // 2), _pad_last(v_XKH, NUM_LANES // 2)
        pairs = self.num_kv_heads // 2
        shape = (*k_XKH.shape[:-2], pairs, NUM_LANES)
        parts = [k_XKH[..., : 2 * pairs, :].reshape(shape)]
        if self.num_kv_heads % 2:
            parts.append(jnp.concatenate([k_XKH[..., -1:, :], v_XKH[..., -1:, :]], -1))
        parts.append(jnp.flip(v_XKH[..., : 2 * pairs, :].reshape(shape), -2))
        return jnp.concatenate(parts, -2)

    def heads(self, tiles: Array) -> tuple[Array, Array]:
        """The inverse of `tiles`."""
        K, H = self.num_kv_heads, self.head_dim
        if self.heads_per_tile == 1:
            return tiles[..., :K, :H], jnp.flip(tiles[..., K:, :H], -2)
        pairs, half = K // 2, NUM_LANES // 2
        shape = (*tiles.shape[:-2], 2 * pairs, half)
        k, v = [tiles[..., :pairs, :].reshape(shape)], [jnp.flip(tiles[..., K - pairs :, :], -2).reshape(shape)]
        if K % 2:
            k.append(tiles[..., pairs : pairs + 1, :half])
            v.append(tiles[..., pairs : pairs + 1, half:])
        return jnp.concatenate(k, -2)[..., :H], jnp.concatenate(v, -2)[..., :H]

    def q_words_of(self, q_TNH: Array) -> Array:
        """[T, N, H] -> uint32 [T, q_stride, 128]."""
        T = q_TNH.shape[0]
        G = self.num_heads // self.num_kv_heads
        q_TKGH = q_TNH.reshape(T, self.num_kv_heads, G, self.head_dim)
        if self.heads_per_tile == 1:
            rows = _pad_last(q_TKGH, self.lanes)
        else:
            half = _pad_last(q_TKGH, NUM_LANES // 2)
            half = jnp.pad(half, ((0, 0), (0, self.num_kv_heads % 2), (0, 0), (0, 0)))
            half = half.reshape(T, self.num_tile_heads, 2, G, NUM_LANES // 2)
            zeros = jnp.zeros_like(half[:, :, :1])
            first = jnp.concatenate([half[:, :, :1], zeros], -1)
            second = jnp.concatenate([zeros, half[:, :, 1:]], -1)
            rows = jnp.concatenate([first, second], 2).reshape(T, self.num_tile_heads, 2 * G, NUM_LANES)
        J = self.words_per_tile_head
        rows = rows.reshape(T, self.num_tile_heads, self.q_pack, J, self.folds, NUM_LANES)
        if self.q_pack == 1:
            words = lax.bitcast_convert_type(rows[:, :, 0].astype(jnp.float32), jnp.uint32)
        else:
            bits = lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.uint32)
            words = bits[:, :, 0] | (bits[:, :, 1] << 16)
        words = jnp.moveaxis(words, 3, 1).reshape(T, self.folds, self.num_tile_heads * J, NUM_LANES)
        words = jnp.pad(words, ((0, 0), (0, 0), (0, self.q_words - words.shape[2]), (0, 0)))
        return words.reshape(T, self.q_stride, NUM_LANES)

    def out_of_words(self, words: Array) -> Array:
        """uint32 [T, q_stride, 128] -> [T, N, H] in the queries' dtype."""
        T, J, G = words.shape[0], self.words_per_tile_head, self.num_heads // self.num_kv_heads
        words = words.reshape(T, self.folds, self.q_words, NUM_LANES)[:, :, : self.num_tile_heads * J]
        words = words.reshape(T, self.folds, self.num_tile_heads, J, NUM_LANES)
        words = jnp.moveaxis(words, 1, 3).reshape(T, self.num_tile_heads, J, self.lanes)
        if self.q_pack == 1:
            rows = lax.bitcast_convert_type(words, jnp.float32)
        else:
            parts = jnp.stack([words & 0xFFFF, words >> 16], 2).astype(jnp.uint16)
            rows = lax.bitcast_convert_type(parts, jnp.bfloat16)
        rows = rows.reshape(T, self.num_tile_heads, self.rows_per_token, self.lanes)
        if self.heads_per_tile == 1:
            return rows[..., : self.head_dim].reshape(T, self.num_heads, self.head_dim).astype(self.q_dtype)
        half = NUM_LANES // 2
        pairs = self.num_kv_heads // 2
        first, second = rows[:, :, :G, :half], rows[:, :, G:, half:]
        out = jnp.stack([first[:, :pairs], second[:, :pairs]], 2).reshape(T, 2 * pairs, G, half)
        if self.num_kv_heads % 2:  # Its values are in the upper half of the tile.
            out = jnp.concatenate([out, rows[:, pairs:, :G, half:]], 1)
        return out[..., : self.head_dim].reshape(T, self.num_heads, self.head_dim).astype(self.q_dtype)

    def sinks_of(self, sinks_N: Array) -> Array:
        """[N] -> float32 [tile heads, rows of a token], in the order of the words' parts."""
        G = self.num_heads // self.num_kv_heads
        rows = sinks_N.astype(jnp.float32).reshape(self.num_kv_heads, G)
        rows = jnp.pad(rows, ((0, -self.num_kv_heads % self.heads_per_tile), (0, 0)))
        rows = rows.reshape(self.num_tile_heads, self.q_pack, self.words_per_tile_head)
        return jnp.swapaxes(rows, 1, 2).reshape(self.num_tile_heads, self.rows_per_token)

    def kv_words_of(self, tiles: Array) -> Array:
        """[T, tiles, lanes] in the cache's dtype -> uint32 [T, kv_stride, 128]."""
        T = tiles.shape[0]
        bits = lax.bitcast_convert_type(tiles, jnp.dtype(f"uint{32 // self.kv_pack}")).astype(jnp.uint32)
        bits = jnp.pad(bits, ((0, 0), (0, self.kv_words * self.kv_pack - self.num_tiles), (0, 0)))
        bits = bits.reshape(T, self.kv_words, self.kv_pack, self.folds, NUM_LANES)
        words = bits[:, :, 0]
        for part in range(1, self.kv_pack):
            words |= bits[:, :, part] << (32 // self.kv_pack * part)
        words = jnp.moveaxis(words, 2, 1).reshape(T, self.folds * self.kv_words, NUM_LANES)
        return jnp.pad(words, ((0, 0), (0, self.kv_stride - words.shape[1]), (0, 0)))


def _pad_last(x: Array, size: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
