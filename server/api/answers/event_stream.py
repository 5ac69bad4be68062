"""An answer that is sent as it is made: server-sent events."""

import asyncio
import logging
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm import OutputDelta
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.client_watch import ClientLeftError
from jaxllm.server.api.generation.deltas import DeltaSource

logger = logging.getLogger("jaxllm.server")

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}}
"""For `responses` of a route, beside its whole answer."""


class EventWriter(Protocol):
    """Puts the events of one answer into words: bytes that are ready to be sent, and may be empty."""

    def begin(self) -> bytes:
        """The engine has taken the request in."""
        ...

    def add(self, delta: OutputDelta) -> bytes:
        """The answer goes on. What this raises ends the stream."""
        ...

    async def end(self) -> bytes:
        """All choices are complete."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """In place of `end`."""
        ...


class EventStream(Response):
    """Sends events as they are made.

    A step of the engine brings news to all streams at once. Each writes its own in the call that brings them, without
    a task to be woken; its task waits for the end. If the connection takes no more at present, events wait and become
    fewer and longer, and others do not notice.

    The status is sent with the first event, so that what fails before that has a status of its own. Where nothing is
    said for `keep_alive_s`, a comment is sent before twice that time is over, lest a proxy give the connection up; it
    may come before the first event.
    """

    media_type = "text/event-stream"

    def __init__(self, source: DeltaSource, writer: EventWriter, first: bytes, keep_alive_s: float) -> None:
        """Use `start`."""
        # A proxy must neither keep events for later nor pack them.
        super().__init__(headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._writer = writer
        self._first = first
        self._keep_alive_s = keep_alive_s
        self._writing: asyncio.Task[None] | None = None
        self._is_writing = False
        self._is_silent = False

    @classmethod
    async def start(cls, source: DeltaSource, writer: EventWriter, *, keep_alive_s: float) -> "EventStream":
        """Waits for the first event. Raises what `Generation.take` raises before it."""
        events = writer.begin()
        news = asyncio.Event()
        source.listen(news.set)
        try:
            async with asyncio.timeout(keep_alive_s):
                while not events and not source.is_complete:
                    if (delta := source.take()) is not None:
                        events = writer.add(delta)
                    else:
                        news.clear()
                        await news.wait()
        except TimeoutError:
            events = KEEP_ALIVE
        except BaseException:
            source.close()
            raise
        return cls(source, writer, events, keep_alive_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._source.listen(self._write_soon)
            self._write_soon(self._first)
            while not (await asyncio.wait((self._ended,), timeout=self._keep_alive_s))[0]:
                if self._is_silent:
                    self._write_soon(KEEP_ALIVE)
                self._is_silent = True
            self._ended.result()
        finally:
            if self._writing is not None:
                self._writing.cancel()
            self._source.close()

    def _write_soon(self, events: bytes = b"") -> None:
        """Writes what there is, before it returns if the connection takes it. If it is being written already, that goes
        on with what is new."""
        if not self._is_writing:
            self._is_writing = True
            self._writing = asyncio.Task(self._write(events), loop=self._loop, eager_start=True)

    async def _write(self, events: bytes) -> None:
        try:
            if await self._write_news(events):
                self._ended.set_result(None)
        except Exception as error:
            self._ended.set_exception(error)
        finally:
            self._is_writing = False

    async def _write_news(self, events: bytes) -> bool:
        """Whether that was the last."""
        source, writer = self._source, self._writer
        try:
            if events:
                await self._send_body(events)
            while (delta := source.take()) is not None:
                if events := writer.add(delta):
                    await self._send_body(events)
            if not source.is_complete:
                return False
            source.close()
            last = await writer.end()
        except ClientLeftError as error:
            error.__traceback__ = None  # It leads to the source, which keeps the error: a cycle.
            return True
        except Exception as error:
            known = ApiError.of(error)
            if not isinstance(error, ApiError) and known.status == 500:
                logger.error("%s failed while it was streamed", self._scope["path"], exc_info=error)
            last = writer.fail(known)
        await self._send_body(last, more=False)
        return True

    async def _send_body(self, events: bytes, *, more: bool = True) -> None:
        self._is_silent = False
        await self._send({"type": "http.response.body", "body": events, "more_body": more})
