"""The HTTP connection: uvicorn's, as strict as the RFCs ask, and with limits on clients that are slow on purpose."""

import asyncio
import json
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxllm.server.api.errors import ApiError, error_body
from jaxllm.server.http.descriptor_reserve import LIFE_S, PROBES, DescriptorReserve
from jaxllm.server.http.request_head import (
    MAX_HEAD_BYTES,
    RefusedRequest,
    check_head,
    check_size,
    check_target,
    path_and_query,
    refusal_of,
)

_LINGER_S = 2.0  # in which the client of a refused request may go on sending; a reset would take its answer away
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0  # between looks whether a client that has ended its side is still there
_OLD_CLIENTS_S = 1.0  # for a client of HTTP/1.0, which cannot be asked

OnRefusal = Callable[[str, str, int, str], None]


class GuardedProtocol(HttpToolsProtocol):
    """Refuses what is not HTTP as the RFCs have it, and closes a connection

    - on which the headers of a request have not come `header_timeout_s` after it was opened, or after their first
      byte (408), or are larger than 64 KiB (431);
    - whose client has taken nothing for `send_timeout_s` of what waits to be sent.

    Between requests uvicorn's keep-alive timeout holds. Clients of HTTP/1.0 get no chunks; those that offer HTTP/2 or
    WebSocket get HTTP/1.1. A client that ends its side of the connection after a request gets the answer if it still
    listens, which is found out by an interim response, and if it does so before the answer begins.

    reserve: for connections that come when file descriptors are short; all of a process share it.
    on_refusal: called with path, id, status and message of what is refused here.
    """

    def __init__(
        self,
        *args: Any,
        header_timeout_s: float,
        send_timeout_s: float,
        reserve: DescriptorReserve,
        on_refusal: OnRefusal,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._header_timeout_s = header_timeout_s
        self._send_timeout_s = send_timeout_s
        self._reserve = reserve
        self._is_spare = False  # whether it is one for probes alone
        self._on_refusal = on_refusal
        self._header_timer: asyncio.TimerHandle | None = None  # while the headers of a request are awaited
        self._send_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self.url = b""
        self._is_replayed = False  # the head that the parser reads
        self._has_begun = False  # the request whose headers are awaited
        self._num_head_bytes = 0  # of the request whose headers are read, or of its trailers
        self._num_silent_bytes = 0  # that came without completing a line of them
        self._active: RequestResponseCycle | None = None  # the one that is being answered; `cycle` is the newest
        self._refusal: RefusedRequest | None = None
        self._has_asked = False  # whether a client that has ended its side is still there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._reserve.holds(transport):
            self._is_spare = True
            self._header_timeout_s = min(self._header_timeout_s, LIFE_S)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        if self._is_spare:
            self._reserve.forget(self.transport)
        if self._active is not None:  # uvicorn tells the newest one, which may be waiting behind it.
            self._active.disconnected = True
            self._active.message_event.set()
            self._active = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            return
        if self._header_timer is None and self._is_idle:
            self._expect_headers()  # Whatever comes must become a request.
        self._num_silent_bytes += len(data)
        try:
            self._feed(data)
            if self._num_silent_bytes > MAX_HEAD_BYTES:
                check_size(self._num_silent_bytes)
        except httptools.HttpParserError as error:
            self._refuse(refusal_of(error, data))
        except RefusedRequest as error:
            self._refuse(error)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        active = self._active
        if (
            self._refusal is not None
            or active is None
            or active.response_started
            or self.cycle.more_body
            or self.scheme == "https"  # where a connection has no sides
        ):
            return None
        self.cycle.keep_alive = False
        self._look_for_client(_FIRST_LOOK_S, 0.0)
        return True

    def on_message_begin(self) -> None:
        if self._is_replayed:
            return
        super().on_message_begin()
        if self._header_timer is None:  # It came with the request before.
            self._expect_headers()
        self._num_head_bytes = self._num_silent_bytes = 0
        self._has_begun = True

    def on_url(self, url: bytes) -> None:
        if self._is_replayed:
            return
        super().on_url(url)
        self._num_silent_bytes = 0
        check_target(self.url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_replayed:
            return
        self._num_silent_bytes = 0
        self._num_head_bytes += len(name) + len(value) + 4
        check_size(self._num_head_bytes + len(self.url))
        if self._header_timer is not None:  # Trailers are no headers: nobody has asked for any.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_replayed:
            return
        self._num_head_bytes = self._num_silent_bytes = 0
        self._stop_header_timer()
        method, version = self.parser.get_method().decode(), self.parser.get_http_version()
        self.scope["method"] = method
        check_head(method, version, self.headers)
        self.url = path_and_query(self.url, method)
        if self._is_spare and self.url.partition(b"?")[0].decode() not in PROBES:
            self._reserve.note()
            raise RefusedRequest(503, "the server has no file descriptors for more connections", (b"retry-after", b"1"))
        super().on_headers_complete()
        if self._is_spare:
            self.cycle.keep_alive = False
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.send = partial(_send_without_chunks, self.cycle, self.cycle.send)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._num_silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_silent_bytes = 0
        if not self.parser.should_upgrade() or self._framing() is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._active = None
        super().on_response_complete()  # which begins with the next one
        if self._refusal is not None and self._active is None and not self.transport.is_closing():
            self._send_refusal(self._refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or (self._active is None and not self.cycle.more_body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Nothing is upgraded here. To the parser, the offer is the end of the request, before its body."""
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            if (framing := self._framing()) is not None:
                self._is_replayed = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % framing)
                self._is_replayed = False
            if not data:
                return None

    def _framing(self) -> tuple[bytes, bytes] | None:
        """The header that tells where the body ends; None where there is no body."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" \t0")):
                return name, value
        return None

    def _expect_headers(self) -> None:
        self._has_begun = False
        self._num_head_bytes = self._num_silent_bytes = 0
        self._header_timer = self.loop.call_later(self._header_timeout_s, self._headers_are_late)

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self._active is not None:  # Meanwhile we do not always read.
            self._header_timer = self.loop.call_later(self._header_timeout_s, self._headers_are_late)
        elif self._has_begun:
            self._refuse(RefusedRequest(408, "the headers took too long to come"))
        else:  # Nothing was asked, so nobody waits for an answer.
            self.transport.close()

    def _refuse(self, error: RefusedRequest) -> None:
        """Answers the request that is being read with an error, after those before it, and closes the connection."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        is_body = self._header_timer is None and self.cycle is not None and self.cycle.more_body
        self._stop_header_timer()
        if is_body and self.pipeline:
            self.pipeline.popleft()  # Its turn has not come.
        elif is_body and self.cycle.response_started:
            return self.transport.close()
        elif is_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._active = None
        self._refusal = error
        if self._active is None:
            self._send_refusal(error)

    def _send_refusal(self, error: RefusedRequest) -> None:
        self._unset_keepalive_if_required()
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        request_id = secrets.token_hex(16)
        self._on_refusal(path, request_id, error.status, error.message)
        scope = {"path": path, "headers": self.headers or [], "request_id": request_id}
        body = json.dumps(error_body(scope, ApiError(error.status, error.message))).encode()
        headers = [*self.server_state.default_headers, *error.headers, (b"x-request-id", request_id.encode())]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        head += b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        is_head = self.scope is not None and self.scope.get("method") == "HEAD"
        self.transport.write(STATUS_LINE[error.status] + head + (b"" if is_head else body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()  # what nobody looks at
        self._close_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _look_for_client(self, delay_s: float, waited_s: float) -> None:
        """Of a client that has ended its side: if it has ended the other one too, whatever we send is answered by a
        reset."""
        if self.transport.is_closing() or (active := self._active) is None:
            return
        has_left = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if not active.response_started:
            if active.scope["http_version"] == "1.0":
                has_left |= waited_s >= _OLD_CLIENTS_S
            elif waited_s and not self._has_asked:
                self._has_asked = True
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if has_left:
            return self.transport.abort()
        self._close_timer = self.loop.call_later(
            delay_s, self._look_for_client, min(2 * delay_s, _LAST_LOOK_S), waited_s + delay_s
        )

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
