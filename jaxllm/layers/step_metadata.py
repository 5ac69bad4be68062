"""Which tokens of a step belong to which sequence."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class StepMetadata(NamedTuple):
    """What layers know of the step beside what is computed of its tokens. See `ragged_paged_attention`.

    positions_T: int32, of each token in its sequence.
    kv_lens_S: int32, tokens of each sequence after this step.
    cu_q_lens: int32 [S + 1], where the tokens of each sequence begin.
    num_seqs: int32 [1], how many sequences are real.
    decode_only: each real sequence has one token. Static.
    implementation: of the kernel; None picks by platform. Static.
    """

    positions_T: Array
    kv_lens_S: Array
    cu_q_lens: Array
    num_seqs: Array
    decode_only: bool
    implementation: str | None

    @property
    def num_tokens(self) -> Array:
        """int32 []: the real tokens of the step. They come first; what follows is padding."""
        return self.cu_q_lens[self.num_seqs[0]]

    @property
    def is_real_T(self) -> Array:
        """bool [T]: which tokens are no padding."""
        return jnp.arange(self.positions_T.shape[0]) < self.num_tokens
