"""A light HTTP/1.1 client, for a load of requests to one server.

What it leaves out (redirects, cookies, proxies, compression) is what would cost time beside a server that is measured.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from jaxllm.server.commands.client.http_response import Response, TransportError

OnBody = Callable[[bytes], None]


class HttpClient:
    """Connections to one server, kept open and used again; as many as there are requests at once.

    url: "http://host:port" or "https://…". A path in it comes before the path of each request; a last "/v1", as in
      OpenAI's base URLs, is dropped, as the requests' paths have it.
    api_key: sent as a bearer token, if not empty.

    Raises ValueError: not such a URL, or a key that no header can have.
    """

    def __init__(self, url: str, *, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the URL is {url!r}; it must be http://HOST:PORT or https://HOST:PORT")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"the URL is {url!r}; it must have no user, no query and no fragment")
        if not api_key.isascii() or not api_key.isprintable():
            raise ValueError("the API key has characters that a header cannot have; it must be printable ASCII")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._common = f"host: {parts.netloc}\r\naccept: */*\r\n{authorization}"
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        on_body: OnBody | None = None,
    ) -> Response:
        """Sends a request with a JSON body and waits for the end of the answer. Cancelling hangs up.

        on_body: gets each piece of the body of an answer with status 200 at the moment when it is read; the body of
          the Response is then empty.

        Raises TransportError.
        """
        lines = [f"{name}: {value}" for name, value in (headers or {}).items()]
        if any(not line.isprintable() for line in (path, *lines)):
            raise ValueError("a header or the path has a line break, or another character that it must not have")
        own = "".join(f"{line}\r\n" for line in lines)
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._common}{own}{length}\r\n"
        message = head.encode("latin-1") + body
        while True:
            connection, is_fresh = await self._connect()
            try:
                response = await connection.exchange(message, on_body)
            except _HungUpError as error:
                # The server may close an idle connection while we write to it: that request was not read.
                if connection.has_answered or is_fresh:
                    raise TransportError(f"{self.url} {error}") from error
                continue
            except BaseException:
                connection.close()
                raise
            if connection.can_be_used_again:
                self._idle.append(connection)
            else:
                connection.close()
            return response

    async def close(self) -> None:
        """Hangs up."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _connect(self) -> "tuple[_Connection, bool]":
        """A connection, and whether it is a fresh one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise TransportError(f"{self.url} cannot be reached: {error}") from error
        return connection, True


def run(coroutine: Coroutine[Any, Any, int]) -> int:
    """`asyncio.run` on uvloop, where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


class _HungUpError(Exception):
    """The connection was lost before the end of the answer."""


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_answered = False
        self.can_be_used_again = False
        self._transport: asyncio.Transport
        self._done: asyncio.Future[Response] | None = None

    async def exchange(self, message: bytes, on_body: OnBody | None) -> Response:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._on_body = on_body
        self.has_answered = self.can_be_used_again = False
        self._done = asyncio.get_running_loop().create_future()
        if not self.is_open:
            raise _HungUpError("has hung up")
        self._transport.write(message)
        try:
            return await self._done
        finally:
            self._done = None

    def close(self) -> None:
        if self.is_open:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        if self._done is None:  # Nobody asked.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(TransportError(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        has_length = not self._headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        if self.has_answered and self._headers and not has_length and exc is None:
            self._finish()  # The end of the connection is the end of the body.
        else:
            self._fail(_HungUpError("has hung up" + (" in the middle of an answer" if self.has_answered else "")))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._on_body = None

    def on_body(self, piece: bytes) -> None:
        if self._on_body is not None:
            self._on_body(piece)
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.can_be_used_again = self._parser.should_keep_alive()
            self._finish()
        else:
            self._headers.clear()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Response(self._parser.get_status_code(), self._headers, b"".join(self._pieces)))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
