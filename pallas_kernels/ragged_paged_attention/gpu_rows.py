"""How a warpgroup takes its 64 rows of queries through the blocks of keys of a segment. Both GPU kernels do it so."""

import dataclasses
from collections.abc import Callable
from functools import partial

from jax import Array, lax

from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import Ref, Scores, State, add_values, multiply_keys
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_work import Segment

MAX_KNOWN_HEAD_DIM = 128


def _nothing(*_: Array) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of queries, and how they get the blocks that they attend to.

    The functions get the number of a block, counted from the segment's first. What there is of it that a row does not
    see has a weight of zero.
    """

    scores: Scores
    block_len: int
    q_smem: Ref  # [W, ROWS, H], of W warpgroups,
    warpgroup: Array | int  # of which this one has its own.
    weights_smem: Ref | None  # See `add_values`.
    keys: Callable[[Array], Ref]  # Waits for the keys of a block, [block_len, H].
    values: Callable[[Array, bool], Ref]  # Waits for its values; also gets whether all rows see the whole block.
    end_keys: Callable[[Array], None] = _nothing  # The keys of a block are no more needed.
    end_values: Callable[[Array], None] = _nothing
    turn: Callable[[], None] = _nothing  # Called while keys are multiplied, and before values are.

    def attend(self, segment: Segment, positions: Array, k_scale: Array | None) -> State:
        """The state of the rows after a segment. `positions`: of the rows' tokens, scalar or [ROWS]."""
        first, end = segment.first_block, segment.end_block
        inner, outer = self.scores.inner_blocks(segment.unit, self.block_len, first, end)
        head_dim = self.q_smem.shape[-1]

        def step(block: Array, state: State, *, is_inner: bool) -> State:
            number = block - first
            # Where a large head is in shared memory would stay in so many registers that others were spilled, if the
            # compiler knew that it is the same place each time.
            warpgroup = lax.optimization_barrier(self.warpgroup) if head_dim > MAX_KNOWN_HEAD_DIM else self.warpgroup
            scores = multiply_keys(self.q_smem.at[warpgroup], self.keys(number), self.turn)
            self.end_keys(number)
            state, weights = self.scores.update(
                state,
                scores,
                k_scale=k_scale,
                positions=None if is_inner else positions,
                first_key=block * self.block_len,
            )
            weights = weights.astype(self.q_smem.dtype)  # Now: in float32 they take too many registers.
            values = self.values(number, is_inner)
            self.turn()
            state = add_values(state, weights, values, self.weights_smem)
            self.end_values(number)
            return state

        edge_step, inner_step = partial(step, is_inner=False), partial(step, is_inner=True)
        state = State.empty(head_dim)
        if self.scores.sliding_window is not None:
            state = lax.fori_loop(first, inner, edge_step, state)
        state = lax.fori_loop(inner, outer, inner_step, state)
        return lax.fori_loop(outer, end, edge_step, state)
