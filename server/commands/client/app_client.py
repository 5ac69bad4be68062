"""Requests to the HTTP application of this process, without a socket."""

import asyncio
from collections.abc import Mapping
from typing import Any

from jaxllm.server.commands.client.http_response import Response


class AppClient:
    """Calls an ASGI application as `HttpClient` calls a server."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Sends a request with a JSON body and waits for the end of the answer. Cancelling it cancels the route."""
        status, answer_headers, pieces = 0, {}, []
        own = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        path_only, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path_only,
            "raw_path": path_only.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in own.items()],
            "client": None,
            "server": ("localhost", None),
        }
        is_read = False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.get_running_loop().create_future()  # This client stays until it has the whole answer.
            raise AssertionError

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name, value in message.get("headers", ()):
                    answer_headers[name.decode("latin-1").lower()] = value.decode("latin-1")
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return Response(status, answer_headers, b"".join(pieces))
