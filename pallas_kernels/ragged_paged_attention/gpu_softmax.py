"""Attention of 64 rows to one block of keys after another, in the registers of a warpgroup.

The running maximum and sum of "Online normalizer calculation for softmax" (arXiv 1805.02867), in base 2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import Unit

LOG2_E = 1.4426950408889634
MASKED = -1e30  # The maximum of a row that has seen nothing. Finite: from it to a masked score, -inf, it is -inf too.
ROWS = 64  # Of a warpgroup's matrix product.
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
THREAD_COLUMNS = 6  # The bits of a column's number that tell whose it is of the four threads that share a row.

Ref = Any


class State(NamedTuple):
    """Of each row, before it is divided by `total`."""

    acc: Array  # float32 [ROWS, H], weights times values
    max: Array  # float32 [ROWS], of the logits of base 2
    total: Array  # float32 [ROWS], of the weights

    @classmethod
    def empty(cls, head_dim: int) -> "State":
        return cls(
            acc=plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            max=plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), ROW_LAYOUT),
            total=plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW_LAYOUT),
        )

    def part(self) -> tuple[Array, Array]:
        """For `gpu_combine`: what values are multiplied by, and the logarithm (base 2) of the weight that they have."""
        # A row that has seen nothing has no weight, but must not be NaN.
        total = jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)
        return 1.0 / total, self.max + jnp.log2(total)

    def result(self, sinks: Array | None, v_scale: Array | None) -> Array:
        """What values are multiplied by when a row has seen all its keys. `sinks`: logits of base 2, or None."""
        total = self.total if sinks is None else self.total + jnp.exp2(sinks - self.max)
        factor = 1.0 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return factor if v_scale is None else factor * v_scale


def at_head(values: Ref | None, head: Array) -> Array | None:
    """What there is for a head, if there is anything."""
    return None if values is None else values[head]


def scale_rows(x: Array, factor: Array) -> Array:
    """[ROWS, X] times [ROWS]."""
    return x * lax.broadcast_in_dim(factor, x.shape, [0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What becomes of the scores, and which of them count."""

    sm_scale: float
    sliding_window: int | None
    soft_cap: float | None

    def inner_blocks(self, unit: Unit, block: int, first_block: Any, end_block: Any) -> tuple[Any, Any]:
        """The blocks of `block` keys out of `first_block` to `end_block` that all tokens of a unit see whole."""
        end = jnp.clip((unit.first + unit.offset + 1) // block, first_block, end_block)
        if self.sliding_window is None:
            return first_block, end
        low = unit.end + unit.offset - self.sliding_window  # The first key that the last token sees.
        return jnp.clip(-(-low // block), first_block, end), end

    def update(
        self, state: State, scores: Array, *, k_scale: Array | None, positions: Array | None, first_key: Array
    ) -> tuple[State, Array]:
        """The state with another block of keys, but for its values, and the weights of these, [ROWS, block].

        Args:
          scores: products of queries and keys, float32 [ROWS, block].
          k_scale: a factor of the scores.
          positions: those of the rows' tokens, scalar or [ROWS]. None: all keys are visible to all rows.
          first_key: the position of the block's first key.
        """
        factor = self.sm_scale * LOG2_E
        if self.soft_cap is not None:
            scale = self.sm_scale / self.soft_cap
            scores = jnp.tanh(scores * (scale if k_scale is None else scale * k_scale))
            factor = self.soft_cap * LOG2_E
        elif k_scale is not None:
            scores = scores * k_scale
        if positions is not None:
            scores = jnp.where(self._is_visible(positions, first_key, scores.shape), scores, -jnp.inf)
        # The factor multiplies last, where it costs nothing: x * factor - max is one operation, which does not round
        # the product. (Of a finite number instead of -inf it would leave what the maximum was rounded by: 2 ** 1e22.)
        max_ = jnp.maximum(state.max, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(max_, scores.shape, [0]))
        correction = jnp.exp2(state.max - max_)
        return (
            State(
                acc=scale_rows(state.acc, correction),
                max=max_,
                total=state.total * correction + weights.sum(axis=1),
            ),
            weights,
        )

    def _is_visible(self, positions: Array, first_key: Array, shape: tuple[int, ...]) -> Array:
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        last = positions - first_key  # The last column that a row sees.
        if positions.ndim:
            last = lax.broadcast_in_dim(last, shape, [0])
        # What a thread's columns have in common goes to the other side: a comparison with a constant takes no register.
        last, columns = last - (columns & THREAD_COLUMNS), columns & ~THREAD_COLUMNS
        is_visible = columns <= last
        if self.sliding_window is not None:
            is_visible &= columns > last - self.sliding_window
        return is_visible


def multiply_keys(q_smem: Ref, k_smem: Ref, started: Callable[[], None]) -> Array:
    """Scores, float32 [ROWS, block]. Calls `started` while the product is being made."""

    def product(scores: Ref) -> Array:
        plgpu.wgmma(scores, q_smem, k_smem.transpose((1, 0)))
        started()
        return scores[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, k_smem.shape[0]), jnp.float32))


def add_values(state: State, weights: Array, v_smem: Ref, weights_smem: Ref | None) -> State:
    """The state with the weights times values.

    Args:
      weights: [ROWS, block] in the dtype of the values.
      weights_smem: of that shape and dtype: a simulated GPU cannot multiply what lies in registers,
        nor add to what does. None on a real one.
    """
    if weights_smem is None:

        def accumulate(acc: Ref) -> None:
            plgpu.wgmma(acc, weights, v_smem)

        return state._replace(acc=pl.run_state(accumulate)(plgpu.ACC.init(state.acc)))

    weights_smem[...] = weights
    plgpu.commit_smem()

    def product(values: Ref) -> Array:
        plgpu.wgmma(values, weights_smem, v_smem)
        return values[...]

    return state._replace(acc=state.acc + pl.run_scoped(product, plgpu.ACC((ROWS, v_smem.shape[1]), jnp.float32)))
