"""The process of an API worker, which is started again when it has died."""

import logging
import multiprocessing
import time
from typing import TYPE_CHECKING

from jaxllm import JaxLLMError
from jaxllm.server.board import Board

if TYPE_CHECKING:
    from jaxllm.server.http.worker import HttpWorker

logger = logging.getLogger("jaxllm.server")

_SECOND_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before the first start there is none
_LONG_LIFE_S = 60.0  # after so much, a death is not held against the next life


class WorkerProcess:
    """One worker's process after the other. While they die soon, a pause lies between two, which grows from 1 to 30 s;
    after a first death there is none.

    is_alive: whether there is one now.
    """

    def __init__(self, worker: "HttpWorker", address: str, board: Board) -> None:
        """Starts the first. `address`: of the engine's process."""
        self._worker = worker
        self._address = address
        self._board = board
        self._has_served = False
        self._pause_s = 0.0
        self._next_start: float | None = None  # while there is none
        self._start()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def may_have_requests(self) -> bool:
        """Whether its end is to be waited for. A process that is only starting has nothing to finish."""
        return self.is_alive and (self._has_served or self._board.serves(self._worker.index))

    def keep(self) -> None:
        """Starts the process again if it has died, and its pause is over. To be called again and again.

        Raises JaxLLMError if it died before it could ever serve, for then so would the next.
        """
        self._has_served |= self._board.serves(self._worker.index)
        if self.is_alive:
            return
        now = time.monotonic()
        if self._next_start is None:
            self._note_death(now)
        elif now >= self._next_start:
            self._start()

    def end(self, timeout_s: float) -> None:
        """Waits for its end, and kills it when that takes longer."""
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        name = f"jaxllm-http-{self._worker.index}"
        self._process = context.Process(target=self._worker.run, args=(self._address,), name=name)
        self._process.start()
        self._started, self._next_start = time.monotonic(), None

    def _note_death(self, now: float) -> None:
        index, code = self._worker.index, self._process.exitcode
        self._board.set_worker(index, serves=False, num_active=0)
        if not self._has_served:
            raise JaxLLMError(
                f"API worker {index} ended with code {code} before it could serve; the lines above say why"
            )
        if now - self._started > _LONG_LIFE_S:
            self._pause_s = 0.0
        logger.error("API worker %d ended with code %s; it starts again in %g s", index, code, self._pause_s)
        self._next_start = now + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, _SECOND_PAUSE_S), _LONGEST_PAUSE_S)
