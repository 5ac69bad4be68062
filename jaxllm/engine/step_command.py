"""All that a step's launch takes."""

from typing import NamedTuple

import numpy as np

from jaxllm.scheduler import PageMoves
from jaxllm.scheduler.buckets import Bucket


class StepCommand(NamedTuple):
    """What a `Runner` is to do next. Runners of the same model that get the same commands, in the same order, have the
    same caches and give the same results, whatever the time that their copies and compilations take.

    moves: copies of pages, before the step.
    bucket: of the step, which says what program runs; None for no step.
    buffer: int32[n], its `StepBatch`; None for no step.
    """

    moves: PageMoves
    bucket: Bucket | None = None
    buffer: np.ndarray | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.bucket is not None or bool(self.moves)
