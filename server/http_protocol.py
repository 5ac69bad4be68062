"""The HTTP connection: uvicorn's, with limits on clients that are slow on purpose."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_MAX_HEADER_BYTES = 64 * 1024
_LATE = b'{"error":{"message":"the headers took too long to come","type":"timeout_error","param":null,"code":null}}'
_LARGE = (
    b'{"error":{"message":"the request line and headers are too large","type":"invalid_request_error","param":null,'
    b'"code":null}}'
)
_INVALID = b'{"error":{"message":"this is not HTTP","type":"invalid_request_error","param":null,"code":null}}'
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection

    - on which the headers of a request have not come `header_timeout_s` after it was opened, or after their first
      byte (408), or are larger than 64 KiB (431);
    - whose client has taken nothing for `send_timeout_s` of what waits to be sent.

    Between requests uvicorn's keep-alive timeout holds. Clients of HTTP/1.0 get no chunks; those that offer HTTP/2 or
    WebSocket get HTTP/1.1.
    """

    def __init__(self, *args: Any, header_timeout_s: float, send_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timeout_s = header_timeout_s
        self._send_timeout_s = send_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0  # of a request whose headers are incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_timer is not None or self.cycle is None or self.cycle.response_complete:
            # Nothing is upgraded here. To the parser, the offer would be the end of the request, before its body.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
        super().data_received(data)
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", _LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_timer is None:  # not the first request of the connection
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = partial(_send_without_chunks, self.cycle, self.cycle.send)  # type: ignore[method-assign]

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", _INVALID)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _expect_headers(self) -> None:
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(self._header_timeout_s, self._headers_are_late)

    def _headers_are_late(self) -> None:
        if self._num_header_bytes:
            self._refuse(b"408 Request Timeout", _LATE)
        else:  # Nothing was asked, so nobody waits for an answer.
            self._stop_header_timer()
            self.transport.close()

    def _refuse(self, status: bytes, body: bytes) -> None:
        self._stop_header_timer()
        if self.transport.is_closing():
            return
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + head + body)
        self.transport.close()

    def _watch_sending(self, num_waiting_bytes: int) -> None:
        self._send_timer = self.loop.call_later(self._send_timeout_s, self._check_sending, num_waiting_bytes)

    def _check_sending(self, num_waiting_bytes: int) -> None:
        num_left_bytes = self.transport.get_write_buffer_size()
        if num_left_bytes < num_waiting_bytes:
            self._watch_sending(num_left_bytes)
        else:
            self._send_timer = None
            self.transport.abort()  # What is in the buffer would keep a mere `close` waiting.

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


async def _send_without_chunks(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """An answer whose length is not known ends with the connection."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
    elif not message.get("more_body", False) and cycle.expected_content_length > sys.maxsize // 2:
        cycle.expected_content_length = len(message["body"])
    await send(message)
