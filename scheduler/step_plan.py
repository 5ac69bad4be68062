"""What one step does, and what came of it."""

from dataclasses import dataclass

import numpy as np

from jaxllm.scheduler.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, exact and unpadded: which rows of the running table run, and how many tokens each.

    Rows with one token come first, then the chunks. A plan holds for the moment at which it was made: by the
    time its result is known, a row may have changed hands, which `occupancies` tells.

    rows: int32[S], rows of the running table.
    num_scheduled_tokens: int32[S], tokens of the row in this step.
    num_computed_tokens: int32[S], tokens whose keys and values are in the row's pages before this step.
    occupancies: int64[S], whom the row belonged to (`RunningTable.occupancy`).
    samples: bool[S]. The step reaches the last token of the row, so the token sampled for it is a new one.
        The others are in the middle of their prompt, and what is sampled for them is to be ignored.
    from_device: bool[S]. The one token of the row is not known to the host yet: it is what the row's previous
        step samples, and the device takes it from there.
    num_decodes: the number of leading rows that have exactly one token.
    """

    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    occupancies: np.ndarray
    samples: np.ndarray
    from_device: np.ndarray
    num_decodes: int

    @property
    def num_seqs(self) -> int:
        """S: rows in the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T: tokens in the step."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def is_decode_only(self) -> bool:
        """Whether each row has one token."""
        return self.num_decodes == len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The new tokens of one step. What was sampled for a row that has changed hands since is left out.

    rows: int32[M], the row that each token was sampled in.
    token_ids: int32[M], the new tokens.
    requests: the M requests they belong to.
    finished: those of `requests` that ended with this token.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    requests: list[Request]
    finished: list[Request]
