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
from jaxllm.server.api.call import Call
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.client_watch import ClientLeftError, ClientWatch
from jaxllm.server.api.generation.request_account import RequestAccount

if TYPE_CHECKING:
    from jaxllm import OutputStream
    from jaxllm.server.api.server import Server


_GRACE_S = 1.0  # for the engine to end by itself a request whose time is over


class Generation:
    """The choices that the engine makes for one prompt.

    It is a source of deltas (`deltas.DeltaSource`), for one reader. When the client leaves, streamed to or not, the
    engine is told at once, and the reader gets a ClientLeftError. However it ends, metrics and log hear of it once,
    when the engine has told the last of it.

    request_id: its name in the engine.
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
        self._server = server
        self._call = call
        self._scope = http_request.scope
        self._has_ended = False
        self._failure: ApiError | None = None  # what the reader gets when it has the tokens before it
        self._left_over = "abort"  # the finish reason of choices that run when this is closed
        self._account = RequestAccount(
            server, call, params, num_prompt_tokens=num_prompt_tokens, is_streamed=is_streamed
        )
        self._stream = stream
        self._resources = resources
        self._watch = watch
        watch.on_leave = self._end_unread
        if (timeout_s := call.options.timeout_s) is not None:
            alarm = asyncio.get_running_loop().call_later(timeout_s + _GRACE_S, self._end_overdue)
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
            abandoned: list[OutputStream] = []
            try:
                # The engine may be stuck, and keep no time.
                async with asyncio.timeout(call.longest_wait_s) as waiting:
                    watch = ClientWatch(http_request, on_leave=lambda: waiting.reschedule(0.0))
                    resources.callback(watch.stop)
                    stream = await server.llm.submit(
                        prompt_token_ids,
                        params,
                        call.options,
                        request_id=request_id or f"gen-{uuid4().hex}",
                        streams=is_streamed if needs_pieces is None else needs_pieces,
                        on_abandoned=abandoned.append,
                    )
            except TimeoutError:
                error = ClientLeftError() if watch.has_left else _late_start(call)
                for stream in abandoned:
                    account = RequestAccount(
                        server, call, params, num_prompt_tokens=len(prompt_token_ids), is_streamed=is_streamed
                    )
                    account.close("abort" if watch.has_left else "timeout", error.message)
                    account.settle(stream, only_if_it_ran=True)
                raise error from None
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
    def num_output_tokens(self) -> int:
        """So far, of all choices."""
        return self._account.num_output_tokens

    @property
    def num_cached_tokens(self) -> int:
        """See `RequestAccount`."""
        return self._account.num_cached_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the reader has taken all that it wants of every choice."""
        return not self._account.num_running and self._failure is None

    def listen(self, on_news: Callable[[], None]) -> None:
        """`on_news` is called when there is something to take, or an error to be raised. Once this is closed there is
        nothing, and nobody is kept."""
        if not self._has_ended:
            self._stream.on_news = on_news

    def take(self) -> OutputDelta | None:
        """What is new of one choice, until there is nothing (None). The last delta of a choice has the finish reason
        "stop" or "length".

        Raises ApiError, which ends all choices, after the last tokens of the one that has failed: 408 (or 503, if it
        never started) when its time is over, 500 or 503 when the engine failed, 503 when the server stops,
        ClientLeftError.
        """
        while self._failure is None:
            if (delta := self._stream.take()) is None:
                if not self._account.num_running or not self._stream.is_complete:
                    return None
                self._left_over = "error"
                self._failure = ApiError(500, "the engine ended the request without a reason", code="internal_error")
                break
            if not self._account.add(delta):
                continue
            if delta.finish_reason not in (None, "stop", "length"):
                self._left_over = delta.finish_reason
                self._failure = self._failure_of(delta)
                if not delta.token_ids:
                    break
                return replace(delta, finish_reason=None)
            return delta
        self.close()
        raise self._failure

    def complete(self, index: int) -> None:
        """The reader has what it wants of a choice: nothing more comes of it."""
        self._account.complete(index)

    def close(self) -> None:
        """Ends the choices that still run, at once. The listener hears no more. May be called again."""
        if self._has_ended:
            return
        self._has_ended = True
        self._scope["jaxllm.is_logged"] = True  # An error that is the answer needs no line of its own.
        failure = None if isinstance(self._failure, ClientLeftError) else self._failure
        self._account.close(self._left_over, None if failure is None else failure.message)
        self._stream.on_news = _nobody
        with self._resources:
            self._stream.close()
            self._account.settle(self._stream)

    def _failure_of(self, delta: OutputDelta) -> ApiError:
        match delta.finish_reason:
            case "abort" | "error" if self._server.drain.is_stopping:
                return self._server.drain.shutting_down_error()
            case "abort":
                return ApiError(400, "the operator ended this request", code="request_aborted")
            case "timeout":
                return self._timeout_error(has_started=self._account.first_scheduled is not None)
            case _ if self._server.llm.state != "ready":
                message = f"the engine failed: {delta.error}"
                return ApiError(503, message, code="engine_dead", retry_after_s=5.0)
            case _:
                return ApiError(500, f"the engine failed on this request: {delta.error}", code="engine_error")

    def _timeout_error(self, *, has_started: bool) -> ApiError:
        if not has_started:
            return _late_start(self._call)
        message = (
            f"the request was not complete after {self._call.options.timeout_s:g} s, with {self.num_output_tokens:,} "
            "tokens made; ask for fewer tokens (max_tokens) or more time (X-Timeout-S, up to the server's "
            "--request-timeout-s)"
        )
        return ApiError(408, message, code="timeout", should_retry=False)

    def _end_overdue(self) -> None:
        """The engine should have ended this request by itself. If it has not, it is stuck; else the reader is slow."""
        if not self._stream.is_complete:
            self._end_early("timeout", self._timeout_error(has_started=self.num_output_tokens > 0))

    def _end_unread(self) -> None:
        """The client has left."""
        self._end_early("abort", ClientLeftError())

    def _end_early(self, reason: str, failure: ApiError) -> None:
        """The reader hears it at once, if there is one."""
        self._left_over, self._failure, tell = reason, failure, self._stream.on_news
        self.close()
        tell()


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
