"""Requests in progress, and what becomes of them when the server is to stop."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxllm.server.api.errors import ApiError
from jaxllm.server.board import Board, Phase

_POLL_S = 0.05


class Drain:
    """Counts the requests that this API worker is answering, and refuses new ones while the server drains.

    num_active: requests in progress here.
    """

    def __init__(self, board: Board | None = None, worker: int = 0) -> None:
        self.board = board if board is not None else Board()
        self.num_active = 0
        self._worker = worker

    @property
    def is_draining(self) -> bool:
        return not self.board.is_serving

    @property
    def is_stopping(self) -> bool:
        """Whether what runs is being ended."""
        return self.board.phase is Phase.STOPPING

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around the whole answer to a request. Raises ApiError 503 while the server drains."""
        if not self.board.is_serving:
            raise self.draining_error()
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def draining_error(self) -> ApiError:
        """For a request that comes too late."""
        if self.board.phase is Phase.DRAINING:
            message = "the server is draining and takes no new requests; an operator may end this"
        else:
            message = "the server is shutting down and takes no new requests; send it to another one"
        return ApiError(503, message, code="draining", retry_after_s=5.0)

    @staticmethod
    def shutting_down_error() -> ApiError:
        """For a request that the end of the server cut off."""
        message = "the server shut down before the answer was complete; send the request again"
        return ApiError(503, message, code="shutting_down", retry_after_s=5.0)

    def start(self) -> None:
        """An operator begins to drain. Raises ApiError 409 if the server is already shutting down."""
        self._set(Phase.DRAINING)

    def end(self) -> None:
        """An operator takes it back. Raises ApiError 409 if the server is shutting down."""
        self._set(Phase.SERVING)

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Until no request is in progress here, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.num_active and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def _set(self, phase: Phase) -> None:
        if self.board.phase >= Phase.SHUTTING_DOWN:
            raise ApiError(
                409, "the server is shutting down, which cannot be taken back", code="shutting_down", should_retry=False
            )
        self.board.phase = phase

    def _count(self, change: int) -> None:
        self.num_active += change
        self.board.set_worker(self._worker, serves=True, num_active=self.num_active)
