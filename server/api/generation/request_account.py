"""What a request has had of the engine."""

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from jaxllm import OutputDelta, SamplingParams
from jaxllm.server.api.call import Call
from jaxllm.server.observability.finished_request import FinishedRequest

if TYPE_CHECKING:
    from jaxllm import OutputStream
    from jaxllm.server.api.server import Server


class RequestAccount:
    """Takes down the deltas of a request, read or not, and tells metrics, log and trace when the end of every choice
    is known.

    num_output_tokens: so far, of all choices. What the engine makes past the end of an answer is no part of it.
    num_cached_tokens: of the prompt, found in the prefix cache; known when a choice has ended. That choices after the
        first find what it has computed does not count.
    num_running: choices that have not ended.
    first_scheduled: when a choice was in a step for the first time; known when one has ended.
    """

    def __init__(
        self, server: "Server", call: Call, params: SamplingParams, *, num_prompt_tokens: int, is_streamed: bool
    ) -> None:
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_running = params.n
        self.first_scheduled: float | None = None
        self._server = server
        self._call = call
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._is_streamed = is_streamed
        self._first_token: float | None = None
        self._finish_reasons: list[str | None] = [None] * params.n
        self._is_complete = [False] * params.n
        self._output_lens = [0] * params.n
        self._token_times: list[float | None] = [None] * params.n
        self._num_ends = 0  # that the engine has told
        self._error: str | None = None

    def add(self, delta: OutputDelta) -> bool:
        """Takes down new tokens of a choice, and its end. False if its reader has all of it: this is no part of it."""
        is_wanted = not self._is_complete[delta.index]
        if delta.token_ids and is_wanted:
            self._count(delta.index, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._note_times(delta)
            self._end(delta.index, delta.finish_reason)
        return is_wanted

    def complete(self, index: int) -> None:
        """The reader has all that it wants of a choice."""
        self._is_complete[index] = True
        self._end(index, "stop")

    def close(self, reason: str, error: str | None) -> None:
        """Why the choices end that still run; tokens of theirs may come nevertheless."""
        self._error = error
        for index in range(len(self._finish_reasons)):
            self._end(index, reason)

    def settle(self, stream: "OutputStream", *, only_if_it_ran: bool = False) -> None:
        """Takes down what nobody reads, and reports when the engine has told the last of it.

        only_if_it_ran: there is nothing to report of a request for which nothing was made.
        """
        while (delta := stream.take()) is not None:
            self.add(delta)
        if not stream.is_complete:
            stream.on_news = partial(self._settle_soon, stream, only_if_it_ran)
        elif self.num_output_tokens or not only_if_it_ran:
            self._report()

    def _settle_soon(self, stream: "OutputStream", only_if_it_ran: bool) -> None:
        """Not in the call that brings news, which brings them to others too."""
        stream.on_news = _nobody
        asyncio.get_running_loop().call_soon(partial(self.settle, stream, only_if_it_ran=only_if_it_ran))

    def _report(self) -> None:
        call = self._call
        self._server.finished(
            FinishedRequest(
                request_id=call.request_id,
                endpoint=call.endpoint,
                params=self._params,
                num_prompt_tokens=self._num_prompt_tokens,
                output_lens=self._output_lens,
                finish_reasons=[reason or "abort" for reason in self._finish_reasons],
                received=call.received,
                finished=time.monotonic(),
                first_scheduled=self.first_scheduled,
                first_token=self._first_token,
                num_cached_tokens=self.num_cached_tokens,
                is_streamed=self._is_streamed,
                tenant=call.options.tenant,
                key_name=call.caller.key_name,
                priority=call.options.priority,
                error=self._error,
                trace_headers=call.trace_headers,
            )
        )

    def _count(self, index: int, num_tokens: int) -> None:
        metrics, now = self._server.metrics, time.monotonic()
        if not self.num_output_tokens:
            metrics.first_token(now - self._call.received, self._num_prompt_tokens)
        before = self._token_times[index]
        metrics.tokens(num_tokens, None if before is None else now - before)
        self._token_times[index] = now
        self._output_lens[index] += num_tokens
        self.num_output_tokens += num_tokens

    def _note_times(self, delta: OutputDelta) -> None:
        if (metrics := delta.metrics) is not None:
            num_cached = metrics.num_cached_tokens
            self.num_cached_tokens = min(self.num_cached_tokens, num_cached) if self._num_ends else num_cached
            self.first_scheduled = _earlier(self.first_scheduled, metrics.first_scheduled_time)
            self._first_token = _earlier(self._first_token, metrics.first_token_time)
        self._num_ends += 1

    def _end(self, index: int, reason: str) -> None:
        if self._finish_reasons[index] is None:
            self._finish_reasons[index] = reason
            self.num_running -= 1


def _earlier(time_: float | None, other: float | None) -> float | None:
    return other if time_ is None else time_ if other is None else min(time_, other)


def _nobody() -> None:
    """Nobody listens."""
