"""What one step does, and what came of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.scheduler.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step, exact and unpadded: which rows of the running table run, and how many tokens each.

    Rows with one token come first, then the others: chunks of prompts, and drafts to verify. A plan holds for the
    moment at which it was made: by the time its result is known, a row may have changed hands. Its `step_number` tells.

    rows: int64[S], rows of the running table.
    num_scheduled_tokens: int32[S], tokens of the row in this step.
    num_computed_tokens: int32[S], tokens whose keys and values are in the row's pages before this step.
    samples: bool[S]. The step reaches the last token of the row, so what is sampled for it is new. The others are
        in the middle of their prompt, and what is sampled for them is to be ignored.
    all_sample: whether all of `samples` are true.
    from_device: bool[S]. The one token of the row is not known to the host yet: it is what the row's previous
        step samples, and the device takes it from there.
    num_draft_tokens: int32[S], how many of the row's last tokens in this step are drafts, which the step verifies;
        None if no row has any.
    num_decodes: the number of leading rows that have exactly one token.
    num_tokens: T, tokens in the step.
    step_number: the number of the plan (`RunningTable.step_number`).
    started: the requests that got their row in this step.
    time: when it was made, by the scheduler's clock.
    """

    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    samples: np.ndarray
    all_sample: bool
    from_device: np.ndarray
    num_draft_tokens: np.ndarray | None
    num_decodes: int
    num_tokens: int
    step_number: int
    started: list[Request]
    time: float

    @property
    def num_seqs(self) -> int:
        """S: rows in the step."""
        return len(self.rows)

    @property
    def is_decode_only(self) -> bool:
        """Whether each row has one token."""
        return self.num_decodes == len(self.rows)

    @property
    def max_q_len(self) -> int:
        """The most tokens that a row has in the step."""
        return 1 if self.is_decode_only else int(self.num_scheduled_tokens[self.num_decodes :].max())

    @property
    def num_decode_kv_tokens(self) -> int:
        """Tokens whose keys and values the rows with one token read."""
        return int(self.num_computed_tokens[: self.num_decodes].sum()) + self.num_decodes

    @property
    def num_chunk_pairs(self) -> float:
        """Pairs of a query and a key that it sees, in the rows with several tokens."""
        if self.is_decode_only:
            return 0.0
        lens_S = self.num_scheduled_tokens[self.num_decodes :].astype(np.float64)
        return float(lens_S @ (self.num_computed_tokens[self.num_decodes :] + lens_S / 2))


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The new tokens of one step. What was sampled for a request that has finished since is left out.

    rows: int64[M], the row that the tokens of each request were sampled in.
    num_new_tokens: int32[M]: 1, or more where drafts were accepted.
    token_ids: int32[N], the new tokens, request by request.
    requests: the M requests they belong to.
    finished: those of `requests` that ended with these tokens.
    """

    rows: np.ndarray
    num_new_tokens: np.ndarray
    token_ids: np.ndarray
    requests: list[Request]
    finished: list[Request]

    def tokens_by_request(self) -> Iterator[tuple[Request, list[int]]]:
        """Each request with its new tokens, of which there is at least one."""
        token_ids, start = self.token_ids.tolist(), 0
        for request, number in zip(self.requests, self.num_new_tokens.tolist(), strict=True):
            yield request, token_ids[start : start + number]
            start += number

    def joined(self, others: Sequence[tuple[int, Request, list[int]]]) -> "StepOutput":
        """With further requests: (row, request, its new tokens)."""
        if not others:
            return self
        token_ids = np.array([token_id for _, _, its_tokens in others for token_id in its_tokens], np.int32)
        return StepOutput(
            rows=np.append(self.rows, [row for row, _, _ in others]),
            num_new_tokens=np.append(self.num_new_tokens, np.array([len(its) for _, _, its in others], np.int32)),
            token_ids=np.append(self.token_ids, token_ids),
            requests=[*self.requests, *(request for _, request, _ in others)],
            finished=[*self.finished, *(request for _, request, _ in others if request.status.is_finished)],
        )
