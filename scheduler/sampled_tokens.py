"""What a step sampled."""

from typing import NamedTuple

import numpy as np


class SampledTokens(NamedTuple):
    """The tokens of a step, for each row of its plan. What comes for a row in the middle of its prompt means nothing.

    num_tokens: int32[S], how many tokens the row has: one; where drafts were verified, those accepted and the one after
        them; none where the logits are no numbers.
    token_ids: int32[S, M], the row's tokens, and anything behind them.
    """

    num_tokens: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def one_each(cls, token_ids_S: np.ndarray) -> "SampledTokens":
        return cls(np.ones_like(token_ids_S), token_ids_S[:, None])
