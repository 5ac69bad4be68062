"""What a request may cost before a route has seen it: middlewares, written as plain ASGI."""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.keys import caller_of
from jaxllm.server.http.content_encoding import decoded
from jaxllm.server.http.error_answers import error_response

_LINGER_S = 2.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives each request an id: that of its X-Request-Id header, or a new one. It is in `scope["request_id"]` and in
    the answer's headers: X-Request-Id, which is OpenAI's, and Request-Id, which is Anthropic's. An id that is too long,
    or not printable ASCII, is refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id")
        is_good = given is not None and _REQUEST_ID.fullmatch(given) is not None
        request_id = scope["request_id"] = str(given) if is_good else secrets.token_hex(16)

        header = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]

        def send_with_id(message: Message) -> Awaitable[None]:  # plain, for it is called for each event of a stream
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *header]
            return send(message)

        if given is not None and not is_good:
            message = "X-Request-Id must have 1 to 128 characters of printable ASCII without spaces"
            error = ApiError(400, message, param="X-Request-Id")
            return await error_response(scope, error)(scope, receive, send_with_id)
        await self._app(scope, receive, send_with_id)


class Routing:
    """What need not be said for each route: HEAD is answered as GET, whose body the HTTP server leaves out, and a slash
    at the end of a path is of no meaning. OPTIONS of the whole server has an empty answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, method = scope["path"], scope["method"]
            if path == "*":  # which comes with OPTIONS only
                return await Response(status_code=204)(scope, receive, send)
            if method == "HEAD" or (path.endswith("/") and path != "/"):
                method = "GET" if method == "HEAD" else method
                scope = {**scope, "method": method, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads a request's body before the route is called: at most `max_bytes`, also of what it is when it is unpacked,
    within `timeout_s`, and only from those whose key is known, where keys are asked for. No route that takes a body is
    open to others. `scope["jaxllm.body"]` has its pieces."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = _content_length(scope)
        if length == 0:
            return await self._app(scope, receive, send)
        try:
            caller_of(HTTPConnection(scope))
            if length is not None and length > self._max_bytes:
                raise self._too_large(f"{length:,} bytes")
            async with asyncio.timeout(self._timeout_s):
                messages = await self._read(receive)
            if messages[-1]["type"] == "http.disconnect":
                return None
            body = [message.get("body", b"") for message in messages]
            if (encoding := Headers(scope=scope).get("content-encoding")) is not None:
                body = [decoded(b"".join(body), encoding, max_bytes=self._max_bytes)]
                messages = deque([{"type": "http.request", "body": body[0], "more_body": False}])
        except TimeoutError:
            error = ApiError(408, f"the body took longer than {self._timeout_s:g} s to come", code="body_timeout")
            return await self._refuse(error, scope, receive, send)
        except ApiError as error:
            return await self._refuse(error, scope, receive, send)
        scope["jaxllm.body"] = body

        async def replay() -> Message:
            return messages.popleft() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> deque[Message]:
        """The messages with the body, whole. Raises ApiError 413."""
        messages: deque[Message] = deque()
        num_bytes = 0
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] == "http.disconnect":
                return messages
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large(f"more than {self._max_bytes:,} bytes")
            if not message.get("more_body", False):
                return messages

    def _too_large(self, size: str) -> ApiError:
        message = f"the body has {size}; max_body_bytes is {self._max_bytes:,}"
        return ApiError(413, message, code="body_too_large")

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers and closes the connection. A client that is still sending gets a moment to read the answer: closing
        with bytes unread would reset the connection, and the answer would be lost."""
        response = error_response(scope, error)
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_S):
                while (message := await receive())["type"] != "http.disconnect" and message.get("more_body", False):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


def _content_length(scope: Scope) -> int | None:
    """What the headers say; None for a body in chunks."""
    length = None
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value)  # The parser has checked it.
    return length or 0
