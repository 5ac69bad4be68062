"""Answers that come in pieces: server-sent events as OpenAI's clients read them."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.server.api_errors import ApiError
from jaxllm.server.generation import ClientLeftError

logger = logging.getLogger("jaxllm.server")

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode
"""JSON without spaces; texts must be valid Unicode."""


_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}}}
"""For `responses` of a route, beside its whole answer."""


def json_response(body: BaseModel) -> Response:
    """A whole answer. Fields that were not set are left out."""
    return Response(body.model_dump_json(exclude_unset=True), media_type="application/json")


def error_events(error: ApiError) -> bytes:
    """What ends a stream that has failed."""
    return b"data: " + encode_json(error.body()) + b"\n\n" + DONE


class ChunkWriter:
    """Writes the chunks of one streamed answer. What is the same in all of them is encoded once."""

    def __init__(self, fields: Mapping[str, Any], *, include_usage: bool) -> None:
        """`fields` of every chunk: id, object, created, model."""
        self._head = b"data: " + encode_json(dict(fields))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """An event with one choice, which is a JSON object."""
        return self._head + choice + self._tail

    def usage(self, usage: BaseModel) -> bytes:
        """The last event, with the numbers of tokens and no choice."""
        return self._head + b'],"usage":' + usage.model_dump_json().encode() + b"}\n\n"


class EventStream(Response):
    """Sends events as they are made.

    The status is sent with the first event, so that what fails before that has a status of its own. A client that
    reads slowly is waited for, and the events become fewer and longer meanwhile.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], error_events: Callable[[ApiError], bytes]
    ) -> None:
        # A proxy must neither keep events for later nor pack them.
        super().__init__(headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._error_events = error_events

    @classmethod
    async def start(
        cls, events: AsyncGenerator[bytes, None], *, error_events: Callable[[ApiError], bytes] = error_events
    ) -> "EventStream":
        """Waits for the first event. Raises what `events` raises before it.

        error_events: what is sent when `events` raises later.
        """
        return cls(await anext(events), events, error_events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = b""
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ClientLeftError:
                return
            except Exception as error:
                known = ApiError.of(error)
                if not isinstance(error, ApiError) and known.status == 500:
                    logger.error("%s failed while it was streamed", scope["path"], exc_info=error)
                last = self._error_events(known)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await self._events.aclose()
