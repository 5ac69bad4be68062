"""Whether the client is still there."""

import asyncio
from collections.abc import Callable

from fastapi import Request

from jaxllm.server.api.errors import ApiError


class ClientLeftError(ApiError):
    """The client has closed its connection. Nobody reads this answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_left")


class ClientWatch:
    """Waits for the end of the connection: the body has been read, so nothing else can come.

    on_leave: called when the client leaves, once.
    """

    def __init__(self, http_request: Request, on_leave: Callable[[], None]) -> None:
        self.has_left = False
        self.on_leave = on_leave
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._watch(http_request))

    def stop(self) -> None:
        """It is of no interest any more. Nothing is kept that keeps this alive: a request and its connection need not
        wait for the garbage collector."""
        self.on_leave = _nobody
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self, http_request: Request) -> None:
        while (await http_request.receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self.on_leave()


def _nobody() -> None:
    """Nobody wants to know."""
