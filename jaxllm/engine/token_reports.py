"""From what the scheduler takes in to what the core tells: which request has which new tokens."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.sampler import Logprobs
from jaxllm.outputs import FinishReason, TokenLogprobs
from jaxllm.scheduler import Request, RequestStatus, StepOutput, StepPlan

_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORT: "abort",
    RequestStatus.FINISHED_TIMEOUT: "timeout",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(slots=True)
class _Note:
    request: Request
    streams: bool
    num_logprobs: int | None
    has_started: bool = False
    num_reported: int = 0  # of its tokens
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens that were not reported yet

    @property
    def is_watched(self) -> bool:
        """Whether its tokens are to be looked at as they come."""
        return self.streams or self.num_reported == 0 or self.num_logprobs is not None

    def report(self, token_ids: list[int], output: CoreOutput) -> None:
        logprobs = None
        if self.num_logprobs is not None:
            logprobs, self.logprobs = self.logprobs, []
        self.num_reported += len(token_ids)
        output.add_tokens(self.request.request_id, token_ids, logprobs)

    def report_end(self, output: CoreOutput, error: str | None = None) -> None:
        """With the tokens that it has not told yet."""
        if self.request.num_output_tokens > self.num_reported:
            self.report(self.request.output_token_ids[self.num_reported :], output)
        reason = _REASONS[self.request.status]
        output.finished.append((self.request.request_id, reason, error if reason == "error" else None))


class TokenReports:
    """Keeps what each unfinished request still has to tell, and gathers the next `CoreOutput`.

    A step costs what is watched: a request that does not stream is looked at for its first token and at its end.

    num_rows: of the running table.
    """

    def __init__(self, num_rows: int):
        self._notes: dict[str, _Note] = {}
        self._is_watched_row = np.zeros(num_rows, bool)  # holds for rows that run; of the others it means nothing
        self._output = CoreOutput()
        self.num_with_logprobs = 0

    def add(self, request: Request, *, streams: bool, num_logprobs: int | None) -> None:
        self._notes[request.request_id] = _Note(request, streams, num_logprobs)
        self.num_with_logprobs += num_logprobs is not None

    def find(self, request_id: str) -> Request | None:
        """A request whose end nobody was told."""
        note = self._notes.get(request_id)
        return None if note is None else note.request

    def take(self) -> CoreOutput:
        """What there is to tell since the last time."""
        output, self._output = self._output, CoreOutput()
        output.time = output.time or time.monotonic()
        return output

    def start(self, plan: StepPlan) -> None:
        """The plan was made; some requests got their row in it."""
        for request in plan.started:
            note = self._notes[request.request_id]
            self._is_watched_row[request.row] = note.is_watched
            if not note.has_started:  # else it returns from a preemption
                note.has_started = True
                num_cached_tokens = int(plan.num_computed_tokens[plan.rows == request.row][0])
                self._output.started.append((request.request_id, time.monotonic(), num_cached_tokens))

    def append(self, plan: StepPlan, output: StepOutput, logprobs: Logprobs | None, *, rows_are_theirs: bool) -> None:
        """The scheduler has taken in the plan's result.

        logprobs: as numpy arrays, if some row of the plan wants them.
        rows_are_theirs: whether no row has changed hands since the plan was made.
        """
        earlier = None
        if self._output.keys:  # of a step after which something failed
            earlier = self.take()
        if not self._output.time:
            self._output.time = time.monotonic()
        if rows_are_theirs:
            indices = self._is_watched_row[output.rows].nonzero()[0].tolist()
        else:
            indices = [i for i, request in enumerate(output.requests) if self._notes[request.request_id].is_watched]
        if indices:
            self._append(plan, output, logprobs, indices)
        for request in output.finished:
            self.end(request, self._output)
        if earlier is not None:
            self._output = earlier.joined(self._output)

    def _append(self, plan: StepPlan, output: StepOutput, logprobs: Logprobs | None, indices: list[int]) -> None:
        ends = np.cumsum(output.num_new_tokens)[indices].tolist()
        numbers = output.num_new_tokens[indices].tolist()
        all_token_ids = output.token_ids.tolist()
        for index, number, end in zip(indices, numbers, ends, strict=True):
            request = output.requests[index]
            note = self._notes[request.request_id]
            token_ids = all_token_ids[end - number : end]
            if note.num_logprobs is not None:
                assert logprobs is not None
                (place,) = np.flatnonzero(plan.rows == output.rows[index])
                note.logprobs += _token_logprobs(token_ids, logprobs, int(place), note.num_logprobs)
            if note.streams or note.num_reported == 0:
                note.report(token_ids, self._output)
                if not note.is_watched and request.row is not None:
                    self._is_watched_row[request.row] = False

    def end(self, request: Request, output: CoreOutput | None = None, error: str | None = None) -> CoreOutput:
        """A request has ended. Its last tokens and its end are put into `output`, or into one of their own."""
        note = self._notes.pop(request.request_id)
        self.num_with_logprobs -= note.num_logprobs is not None
        output = output if output is not None else CoreOutput(time.monotonic())
        note.report_end(output, error)
        return output

    def end_all(self, requests: Iterable[Request], error: str | None = None) -> None:
        """These have ended, for no reason of the step's."""
        ends = CoreOutput(time.monotonic())
        for request in requests:
            self.end(request, ends, error)
        self._output = self._output.joined(ends) if self._output else ends

    @property
    def requests(self) -> list[Request]:
        """Those whose end nobody was told."""
        return [note.request for note in self._notes.values()]


def _token_logprobs(token_ids: list[int], logprobs: Logprobs, place: int, num_top: int) -> list[TokenLogprobs]:
    """Of the one token that the step sampled for its row number `place`."""
    (token_id,) = token_ids
    top_token_ids, top = logprobs.top_token_ids[place, :num_top].tolist(), logprobs.top[place, :num_top].tolist()
    return [TokenLogprobs(token_id, float(logprobs.sampled[place]), list(zip(top_token_ids, top, strict=True)))]
