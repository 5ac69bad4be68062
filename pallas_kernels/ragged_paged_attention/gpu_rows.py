"""How a warpgroup takes its 64 rows of queries through the blocks of keys of a segment. Both GPU kernels do it so."""

import dataclasses
from collections.abc import Callable
from functools import partial

from jax import Array, lax
from jax.experimental import pallas as pl

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_keys import KVBlocks, Warpgroup
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import (
    Ref,
    Scores,
    State,
    add_values,
    multiply_keys,
)
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import Segment, Visible


def _nothing(*_: Array) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of queries, and the blocks that they attend to."""

    scores: Scores
    blocks: KVBlocks
    q_smem: Ref  # [ROWS, H]
    weights_smem: Ref | None  # See `add_values`.
    group: Warpgroup
    takes_turns: bool = False  # Of two warpgroups one multiplies while the other one weighs its scores.
    begin_block: Callable[[Array, Array], None] = _nothing  # Gets a block of keys and the number of its stage.
    end_keys: Callable[[Array], None] = (
        _nothing  # Gets the number of a stage whose keys, or values, are no more needed.
    )
    end_values: Callable[[Array], None] = _nothing

    def attend(
        self, segment: Segment, visible: Visible, positions: Array, k_scale: Array | None, num_earlier: Array
    ) -> State:
        """The state of the rows after a segment.

        Args:
          positions: of the rows' tokens, scalar or [ROWS].
          num_earlier: how many blocks of keys went through the stages before.
        """
        first, end, block_len = segment.first_block, segment.end_block, self.blocks.block
        inner, outer = self.scores.inner_blocks(segment.unit, block_len, first, end)

        def step(block: Array, state: State, *, is_inner: bool) -> State:
            stage = lax.rem(num_earlier + block - first, self.blocks.num_stages)
            turn = self.group.meet if is_inner and self.takes_turns else _nothing
            self.begin_block(block, stage)
            scores = multiply_keys(self.q_smem, self.blocks.keys(stage, self.group), turn)
            self.end_keys(stage)
            state, weights = self.scores.update(
                state,
                scores,
                k_scale=k_scale,
                positions=None if is_inner else positions,
                first_key=block * block_len,
            )
            weights = weights.astype(self.q_smem.dtype)  # Now: in float32 they take too many registers.
            values = self.blocks.values(stage, block, None if is_inner else visible, self.group)
            turn()
            state = add_values(state, weights, values, self.weights_smem)
            self.end_values(stage)
            return state

        edge_step, inner_step = partial(step, is_inner=False), partial(step, is_inner=True)
        state = State.empty(self.q_smem.shape[-1])
        if self.scores.sliding_window is not None:
            state = lax.fori_loop(first, inner, edge_step, state)
        if self.takes_turns:
            pl.when(self.group.index == 1)(self.group.meet)
        state = lax.fori_loop(inner, outer, inner_step, state)
        if self.takes_turns:
            pl.when(self.group.index == 0)(self.group.meet)
        return lax.fori_loop(outer, end, edge_step, state)
