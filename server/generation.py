"""One prompt on its way through the engine, on behalf of an HTTP request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from fastapi import Request

from jaxllm import OutputDelta, SamplingParams
from jaxllm.server.api_errors import ApiError
from jaxllm.server.call import Call
from jaxllm.server.client_watch import ClientLeftError, ClientWatch
from jaxllm.server.finished_request import FinishedRequest

if TYPE_CHECKING:
    from jaxllm import OutputStream
    from jaxllm.server.app import Server


_GRACE_S = 1.0  # for the engine to end by itself a request whose time is over


class Generation:
    """The choices that the engine makes for one prompt.

    It is a source of deltas (`deltas.DeltaSource`), for one reader. When the client leaves, streamed to or not, the
    engine is told at once, and the reader gets a ClientLeftError. However it ends, metrics and log hear of it once.

    request_id: its name in the engine.
    num_output_tokens: so far, of all choices.
    num_cached_tokens: of the prompt, found in the prefix cache; known when a choice has ended. That choices after the
        first find what it has computed does not count.
    """

    def __init__(
        self,
        server: "Server",
        http_request: Request,
        watch: ClientWatch,
        call: Call,
        stream: "OutputStream",
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        is_streamed: bool,
        resources: ExitStack,
    ) -> None:
        """Use `start`. `stream` has begun; `resources` are given back at the end, and stop the watch."""
        self.request_id = stream.request_id
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._server = server
        self._call = call
        self._scope = http_request.scope
        self._is_streamed = is_streamed
        self._has_ended = False
        self._error: str | None = None
        self._finish_reasons: list[str | None] = [None] * params.n
        self._num_running = params.n
        self._output_lens = [0] * params.n
        self._token_times: list[float | None] = [None] * params.n
        self._first_scheduled: float | None = None
        self._first_token: float | None = None
        self._stream = stream
        self._resources = resources
        self._watch = watch
        watch.on_leave = self._end_unread
        self._is_overdue = False
        if call.timeout_s is not None:
            alarm = asyncio.get_running_loop().call_later(call.timeout_s + _GRACE_S, self._end_overdue)
            resources.callback(alarm.cancel)
        if watch.has_left:  # when the engine had just taken the request in
            self._end_unread()

    @classmethod
    async def start(
        cls,
        server: "Server",
        http_request: Request,
        call: Call,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        default_max_tokens: int | None = None,
        cache_salt: str = "",
        request_id: str | None = None,
        is_streamed: bool = False,
        needs_pieces: bool | None = None,
    ) -> "Generation":
        """Gives a prompt to the engine, and returns when that has taken it in.

        Args:
          default_max_tokens: the endpoint's own, where neither request nor operator set a limit.
          request_id: its name in the engine; a new one when left out.
          is_streamed: whether the answer is, for metrics and log.
          needs_pieces: False if the deltas may wait for the end, which costs least; as `is_streamed` when left out.

        Raises ApiError 400 for a prompt that cannot be served, 503 while the server drains; InvalidRequestError,
        OverloadedError and EngineDeadError of the engine.
        """
        with ExitStack() as resources:
            resources.enter_context(server.drain.request())
            params = _with_limit(server, len(prompt_token_ids), params, default_max_tokens)
            _check_prompt(server, prompt_token_ids, params)
            try:
                # The engine may be stuck, and keep no time.
                async with asyncio.timeout(call.longest_wait_s) as waiting:
                    watch = ClientWatch(http_request, on_leave=lambda: waiting.reschedule(0.0))
                    resources.callback(watch.stop)
                    stream = await server.llm.submit(
                        prompt_token_ids,
                        params,
                        request_id=request_id or f"gen-{uuid4().hex}",
                        priority=call.priority,
                        tenant=call.caller.tenant,
                        cache_salt=cache_salt,
                        timeout_s=call.timeout_s,
                        queue_timeout_s=call.queue_timeout_s,
                        streams=is_streamed if needs_pieces is None else needs_pieces,
                    )
            except TimeoutError:
                raise (ClientLeftError() if watch.has_left else _late_start(call)) from None
            return cls(
                server,
                http_request,
                watch,
                call,
                stream,
                params,
                num_prompt_tokens=len(prompt_token_ids),
                is_streamed=is_streamed,
                resources=resources.pop_all(),
            )

    @property
    def num_choices(self) -> int:
        return self.params.n

    @property
    def is_complete(self) -> bool:
        """Whether the reader has taken all that it wants of every choice."""
        return not self._num_running

    def listen(self, on_news: Callable[[], None]) -> None:
        """`on_news` is called when there is something to take, or an error to be raised. Once this is closed there is
        nothing, and nobody is kept."""
        self._stream.on_news = _nobody if self._has_ended else on_news

    def take(self) -> OutputDelta | None:
        """What is new of one choice, until there is nothing (None). The last delta of a choice has the finish reason
        "stop" or "length".

        Raises ApiError, which ends all choices: 408 (or 503, if it never started) when its time is over, 500 or 503
        when the engine failed, 503 when the server stops, ClientLeftError.
        """
        try:
            while (delta := self._stream.take()) is not None:
                if self._finish_reasons[delta.index] is not None:  # The reader has asked for no more of it.
                    continue
                if delta.token_ids:
                    self._count(delta.index, len(delta.token_ids))
                if delta.finish_reason is not None:
                    self._note_end(delta)
                return delta
            if self._num_running and self._stream.is_complete:
                raise self._early_end()
            return None
        except ApiError as error:
            self._error = None if isinstance(error, ClientLeftError) else error.message
            self.close()
            raise

    def complete(self, index: int) -> None:
        """The reader has what it wants of a choice: nothing more comes of it."""
        if self._finish_reasons[index] is None:
            self._finish_reasons[index] = "stop"
            self._num_running -= 1

    def close(self) -> None:
        """Ends the choices that still run, at once; if there are none, only says so to metrics and log. The listener
        hears no more. May be called again."""
        if self._has_ended:
            return
        self._has_ended = True
        self._stream.on_news = _nobody
        with self._resources:
            self._stream.close()
            self._report()

    def _count(self, index: int, num_tokens: int) -> None:
        metrics, now = self._server.metrics, time.monotonic()
        if not self.num_output_tokens:
            metrics.first_token(now - self._call.received, self.num_prompt_tokens)
        before = self._token_times[index]
        metrics.tokens(num_tokens, None if before is None else now - before)
        self._token_times[index] = now
        self._output_lens[index] += num_tokens
        self.num_output_tokens += num_tokens

    def _note_end(self, delta: OutputDelta) -> None:
        reason, is_first_end = delta.finish_reason, not any(self._finish_reasons)
        self._finish_reasons[delta.index] = reason
        self._num_running -= 1
        if (metrics := delta.metrics) is not None:
            num_cached = metrics.num_cached_tokens
            self.num_cached_tokens = num_cached if is_first_end else min(self.num_cached_tokens, num_cached)
            self._first_scheduled = _earlier(self._first_scheduled, metrics.first_scheduled_time)
            self._first_token = _earlier(self._first_token, metrics.first_token_time)
        if reason in ("stop", "length"):
            return
        raise ClientLeftError if self._watch.has_left else self._failure(delta)

    def _failure(self, delta: OutputDelta) -> ApiError:
        match delta.finish_reason:
            case "abort" | "error" if self._server.drain.is_stopping:
                return self._server.drain.shutting_down_error()
            case "abort":
                return ApiError(400, "the operator ended this request", code="request_aborted")
            case "timeout":
                return self._timeout_error(has_started=self._first_scheduled is not None)
            case _ if self._server.llm.state != "ready":
                message = f"the engine failed: {delta.error}"
                return ApiError(503, message, code="engine_dead", retry_after_s=5.0)
            case _:
                return ApiError(500, f"the engine failed on this request: {delta.error}", code="engine_error")

    def _timeout_error(self, *, has_started: bool) -> ApiError:
        if not has_started:
            return _late_start(self._call)
        message = (
            f"the request was not complete after {self._call.timeout_s:g} s, with {self.num_output_tokens:,} "
            "tokens made; ask for fewer tokens (max_tokens) or more time (X-Timeout-S, up to the server's "
            "--request-timeout-s)"
        )
        return ApiError(408, message, code="timeout", should_retry=False)

    def _early_end(self) -> ApiError:
        """Why the stream has ended before the choices have."""
        if self._watch.has_left:
            return ClientLeftError()
        if self._is_overdue:
            self._finish_reasons = [reason or "timeout" for reason in self._finish_reasons]
            return self._timeout_error(has_started=self.num_output_tokens > 0)
        return ApiError(500, "the engine ended the request without a reason", code="internal_error")

    def _end_overdue(self) -> None:
        """The engine should have ended this request by itself. If it has not, it is stuck; else the reader is slow."""
        if not self._stream.is_complete:
            self._is_overdue = True
            self._stream.close()  # which the reader hears

    def _end_unread(self) -> None:
        """The client has left."""
        self._stream.close()  # which the reader hears, if there is one
        self.close()

    def _report(self) -> None:
        self._scope["jaxllm.is_logged"] = True  # An error that is the answer needs no line of its own.
        left_over = "error" if self._error is not None else "abort"
        call = self._call
        self._server.finished(
            FinishedRequest(
                request_id=call.request_id,
                endpoint=call.endpoint,
                params=self.params,
                num_prompt_tokens=self.num_prompt_tokens,
                output_lens=self._output_lens,
                finish_reasons=[reason or left_over for reason in self._finish_reasons],
                received=call.received,
                finished=time.monotonic(),
                first_scheduled=self._first_scheduled,
                first_token=self._first_token,
                num_cached_tokens=self.num_cached_tokens,
                is_streamed=self._is_streamed,
                tenant=call.caller.tenant,
                key_name=call.caller.key_name,
                priority=call.priority,
                error=self._error,
                trace_headers=call.trace_headers,
            )
        )


def _nobody() -> None:
    """Nobody listens."""


def _late_start(call: Call) -> ApiError:
    waited_s = time.monotonic() - call.received
    message = f"the request waited for {waited_s:.1f} s and did not start in time; send it again later"
    return ApiError(503, message, code="queue_timeout", retry_after_s=1.0)


def _with_limit(
    server: "Server", num_prompt_tokens: int, params: SamplingParams, default_max_tokens: int | None
) -> SamplingParams:
    """A default never makes a request too long: it ends where the context does."""
    limit = server.config.default_max_tokens or default_max_tokens
    if params.max_tokens is not None or limit is None:
        return params
    room = server.llm.info.max_model_len - num_prompt_tokens
    return replace(params, max_tokens=max(1, min(max(limit, params.min_tokens), room)))


def _check_prompt(server: "Server", prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
    info, num_tokens = server.llm.info, len(prompt_token_ids)
    if not num_tokens:
        raise ApiError(400, "the prompt is empty; it must have at least one token", param="prompt")
    limit = server.config.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise ApiError(
            400,
            f"the prompt has {num_tokens:,} tokens; this server takes {limit:,} at most (--max-prompt-tokens)",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = params.max_tokens
    if num_tokens + (max_tokens or 1) > info.max_model_len:
        asked = f"max_tokens is {max_tokens:,}" if max_tokens else "at least 1 must be made"
        raise ApiError(
            400,
            f"the prompt has {num_tokens:,} tokens and {asked}; the context holds {info.max_model_len:,} in all "
            "(max_model_len). Shorten the prompt or lower max_tokens.",
            param="max_tokens" if max_tokens and num_tokens < info.max_model_len else "prompt",
            code="context_length_exceeded",
        )


def _earlier(time_: float | None, other: float | None) -> float | None:
    return other if time_ is None else time_ if other is None else min(time_, other)
