"""Who answers at the port while no API worker does."""

import asyncio
import secrets
import socket
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from jaxllm.server.api.errors import ApiError, error_body
from jaxllm.server.http.descriptor_reserve import DescriptorReserve
from jaxllm.server.http.worker import uvicorn_config
from jaxllm.server.server_config import ServerConfig

_RETRY_AFTER_S = 2.0
_LINGER_S = 2.0  # in which a body is read, lest its client lose the answer


class StandIn:
    """Tells every client 503: while the model loads, and while all API workers have died. The port is listening all
    the time, so it cannot be taken by another server, and nobody waits in its queue.

    listener: a socket that listens; others may take connections from it at the same time.
    """

    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._uvicorn = uvicorn_config(_answer, config, reserve=DescriptorReserve(_ignore), on_refusal=_ignore)
        self._uvicorn.load()
        self._listener = listener
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Takes connections from now on."""
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(
                self._make_protocol, sock=self._listener.dup(), ssl=self._uvicorn.ssl, backlog=self._uvicorn.backlog
            )

    def close(self) -> None:
        """Takes no more; those that it has are answered."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self._uvicorn.http_protocol_class
        protocol: asyncio.Protocol = make(config=self._uvicorn, server_state=ServerState(), app_state={})
        return protocol


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    try:
        async with asyncio.timeout(_LINGER_S):
            while (message := await receive())["type"] != "http.disconnect" and message["more_body"]:
                pass
    except TimeoutError:
        pass
    error = ApiError(
        503, "the server is starting and takes no requests yet", code="starting", retry_after_s=_RETRY_AFTER_S
    )
    scope["request_id"] = request_id = secrets.token_hex(16)
    headers = {**(error.headers or {}), "connection": "close", "x-request-id": request_id}
    response = JSONResponse(error_body(scope, error), error.status, headers)
    await response(scope, receive, send)


def _ignore(*facts: object) -> None:
    """There are no metrics yet."""
