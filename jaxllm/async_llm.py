"""The engine in a process of its own, for an event loop: `await AsyncLLM.start(config)`."""

import asyncio
import itertools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.process.client import CoreClient, State
from jaxllm.engine.process.messages import Abort, Profile, ResetPrefixCache
from jaxllm.engine.process.owner import EngineProcess
from jaxllm.engine.text.detokenizer import Detokenizer, token_bytes
from jaxllm.engine.text.output_processor import OutputProcessor, Processed
from jaxllm.engine.text.output_stream import OutputStream
from jaxllm.errors import InvalidRequestError
from jaxllm.loading.sources import open_checkpoint
from jaxllm.outputs import OutputDelta
from jaxllm.request_options import DEFAULT_OPTIONS, RequestOptions
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Sink = Callable[[], OutputStream | None]
"""Where the deltas of a continuation go. While it is read, a weak reference: a stream that nobody holds is to end."""

_LEAVE_S = 1.0  # in which the engine tells what the requests have made that `close` ends
_POLL_S = 0.01


class AsyncLLM:
    """A client of an engine process. Any number of requests run at once; each is read through its `OutputStream`.

        llm = await AsyncLLM.start(EngineConfig(model="smollm2-135m"))
        stream = await llm.submit(llm.tokenizer.encode("The capital of France is"), SamplingParams(temperature=0))
        async for delta in stream:
            print(delta.text, end="")
        await llm.close()

    It belongs to the event loop in which it was made. A process that several share, an HTTP server's workers for
    instance, is an `EngineProcess` of its own, to which each of them connects.

    on_tokens: called with a number of new tokens whenever the engine tells of some: of all that it makes for requests
      of this client, also those that nobody reads, past a stop string or after a reader has left.
    """

    def __init__(self, client: CoreClient, tokenizer: "PreTrainedTokenizerFast", process: EngineProcess | None):
        """Use `start` or `connect`."""
        assert client.info is not None
        self.info: EngineInfo = client.info.with_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.process = process
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self.on_tokens: Callable[[int], None] = _nobody
        self._outputs: OutputProcessor[_Sink] = OutputProcessor(tokenizer)
        self._handles = itertools.count(1)
        self._waiting: Processed[_Sink] | None = None  # others than the first deltas

    @classmethod
    async def start(cls, config: EngineConfig) -> "AsyncLLM":
        """Starts an engine process, which ends with `close`, or with this process. Returns when it can serve.

        Raises what `LLM` raises.
        """
        process = EngineProcess(config)
        process.start()
        try:
            return await cls._connect(process.address, process)
        except BaseException:
            await asyncio.to_thread(process.stop, 0.0)
            raise

    @classmethod
    async def connect(cls, address: str) -> "AsyncLLM":
        """Connects to the process of an `EngineProcess`, whosever it is. Returns when it can serve.

        Raises what the engine could not start because of, or EngineDeadError when its owner has stopped it.
        """
        return await cls._connect(address, None)

    @classmethod
    async def _connect(cls, address: str, process: EngineProcess | None) -> "AsyncLLM":
        llms: list[AsyncLLM] = []
        client = CoreClient(
            address,
            on_output=lambda output: llms[0]._take_in(output),
            on_lost=lambda reason: llms[0]._lose_all(reason) if llms else None,
        )
        try:
            await client.wait_until_ready()
            assert client.info is not None
            tokenizer = await asyncio.to_thread(_load_tokenizer, client.info)
            llms.append(cls(client, tokenizer, process))
        except BaseException:
            client.close()
            raise
        return llms[0]

    @property
    def state(self) -> State:
        """ "ready", or why `submit` raises EngineDeadError: "restarting" after the process has died, "stopped"."""
        return self._client.state

    @property
    def stats(self) -> EngineStats:
        """The latest that the engine has told. It does so at least every 100 ms, but not in the middle of a step."""
        assert self._client.stats is not None
        return self._client.stats

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine was last heard of. As long as the step that it is in, at least."""
        return self._client.heartbeat_age_s

    @property
    def num_restarts(self) -> int:
        """How often the engine was lost, and with it the requests that ran."""
        return self._client.num_lost

    async def wait_until_ready(self) -> None:
        """Returns when the engine can serve, again. Raises EngineDeadError if it never will."""
        await self._client.wait_until_ready()

    async def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        request_id: str | None = None,
        streams: bool = True,
        on_abandoned: Callable[[OutputStream], None] | None = None,
        **changes: Any,
    ) -> OutputStream:
        """Queues a request. Returns when the engine has taken it in.

        Args:
          prompt_token_ids: at least one, fewer than max_model_len, within the vocabulary.
          options: how it is to be served.
          request_id: for messages, and for `abort`; a new one if it is left out.
          streams: False where the deltas are not shown as they come, which is cheaper: there is one with the first
            token, and one at the end. With stop strings they come all the same.
          on_abandoned: called when this is cancelled before the engine has answered, with the stream, to which what the
            engine makes nevertheless is told, and the end.
          changes: single ones of the options, by their names, such as ``priority=1``.

        Raises InvalidRequestError, OverloadedError if there is no room now, or EngineDeadError.
        """
        if not set(map(type, prompt_token_ids)) <= {int}:
            wrong = next(token_id for token_id in prompt_token_ids if type(token_id) is not int)
            raise InvalidRequestError(f"the prompt has {wrong!r} as a token id; it must be an integer", param="prompt")
        request_id = request_id if request_id is not None else uuid.uuid4().hex
        now = time.monotonic()
        request = CoreRequest.of(
            params,
            replace(options, **changes) if changes else options,
            info=self.info,
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            arrival_time=now,
            streams=streams,
        )
        handles = [next(self._handles) for _ in range(params.n)]
        stream = OutputStream(request_id, handles, self._leave)
        self._outputs.add(
            handles, weakref.ref(stream), prompt_token_ids=prompt_token_ids, params=params, arrival_time=now
        )

        def forget() -> None:
            for handle in handles:
                self._outputs.forget(handle)
            stream.abandon()

        try:
            await self._client.submit(handles, params.seeds(), request, forget=forget)
        except asyncio.CancelledError:
            for handle in handles:
                self._outputs.leave(handle, lambda: stream)
            if on_abandoned is not None:
                on_abandoned(stream)
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """Ends the requests of this id, whichever client of the engine has sent them; their streams end with the reason
        "abort". False if there is none. Raises EngineDeadError."""
        return await self._client.ask(Abort(self._client.next_number(), request_id))

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Makes the engine forget all cached prefixes. While requests run it refuses and returns False; with `force` it
        preempts them. Raises EngineDeadError."""
        return await self._client.ask(ResetPrefixCache(self._client.next_number(), force))

    async def profile(self, folder: str | None) -> None:
        """Starts a trace of JAX's profiler in the engine process, to be written to `folder`; None ends it.

        Raises InvalidRequestError if there is a trace already, or none; or EngineDeadError.
        """
        await self._client.ask(Profile(self._client.next_number(), folder))

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Makes of a request's tokens what the text in its deltas is made of, less stop strings."""
        return Detokenizer(self.tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """What a token looks like, and the bytes that it adds to a text, which may be a part of a character."""
        found = token_bytes(self.tokenizer, token_id)
        return found.decode(errors="replace"), found

    async def close(self) -> None:
        """Ends the requests of this client, and the process, if `start` made it. The streams end with the reason
        "abort", or "error" if the engine does not answer at once."""
        self._client.end([key for key in self._outputs.keys if isinstance(key, int)], "abort")
        deadline = time.monotonic() + _LEAVE_S
        while self._outputs.keys and self.state == "ready" and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._client.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    def _take_in(self, output: CoreOutput) -> None:
        """Hands out what steps have brought: first tokens now, the rest when the tasks that wait for these have run."""
        self._hand_out_waiting()
        if output.token_ids:
            self.on_tokens(len(output.token_ids))
        self._waiting = self._outputs.process(output)
        _hand_out(self._waiting.first)
        self._loop.call_soon(self._hand_out_waiting)

    def _hand_out_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            _hand_out(waiting.others)
            if waiting.stopped:
                self._client.end([handle for handle in waiting.stopped if isinstance(handle, int)], "stop")

    def _lose_all(self, reason: str) -> None:
        self._hand_out_waiting()
        now = time.monotonic()
        _hand_out([self._outputs.finish(key, "error", reason, now=now) for key in self._outputs.keys])

    def _leave(self, handles: list[int], stream: OutputStream | None) -> None:
        """The reader of a stream has left. The stream, if somebody has it, lives until it has the ends."""
        if threading.get_ident() != self._thread_id:
            self._loop.call_soon_threadsafe(self._leave, handles, stream)
            return
        for handle in handles:
            self._outputs.leave(handle, lambda: stream)
        self._client.end(handles, "abort")


def _nobody(num_tokens: int) -> None:
    """Nobody counts tokens."""


def _hand_out(deltas: Iterable[tuple[_Sink, OutputDelta]]) -> None:
    for sink, delta in deltas:
        if (stream := sink()) is not None:
            stream.push(delta)


def _load_tokenizer(info: EngineInfo) -> "PreTrainedTokenizerFast":
    return open_checkpoint(info.model, revision=info.revision).tokenizer()
