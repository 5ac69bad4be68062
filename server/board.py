"""A few numbers that all processes of a server see."""

import mmap
from enum import IntEnum
from pathlib import Path

_HEADER_WORDS = 2  # phase, log level
_WORKER_WORDS = 2  # of each API worker: whether it serves, requests in progress


class Phase(IntEnum):
    """How far a server is from its end."""

    SERVING = 0
    DRAINING = 1  # by an admin, who may take it back
    SHUTTING_DOWN = 2  # after a first signal: what runs may finish
    STOPPING = 3  # after a second signal, or when the time is over: what runs is ended


class Board:
    """Words of 32 bits in shared memory, each written by whoever knows and read by everybody.

    path: a file that the API workers share; None for a server of one process.
    """

    def __init__(self, num_workers: int = 1, path: Path | None = None) -> None:
        num_bytes = 4 * (_HEADER_WORDS + _WORKER_WORDS * num_workers)
        if path is None:
            self._memory = mmap.mmap(-1, num_bytes)
        else:
            with path.open("a+b") as file:
                file.truncate(num_bytes)
                self._memory = mmap.mmap(file.fileno(), num_bytes)
        self._words = memoryview(self._memory).cast("I")

    @property
    def phase(self) -> Phase:
        return Phase(self._words[0])

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._words[0] = phase

    @property
    def is_serving(self) -> bool:
        return self._words[0] == 0

    @property
    def log_level(self) -> int:
        """As the standard library counts them; 0 leaves it as it is."""
        return self._words[1]

    @log_level.setter
    def log_level(self, level: int) -> None:
        self._words[1] = level

    def set_worker(self, worker: int, *, serves: bool, num_active: int) -> None:
        """What an API worker tells of itself: whether it serves, and how many requests it is answering."""
        first = _HEADER_WORDS + _WORKER_WORDS * worker
        self._words[first] = serves
        self._words[first + 1] = num_active

    def serves(self, worker: int) -> bool:
        return bool(self._words[_HEADER_WORDS + _WORKER_WORDS * worker])

    @property
    def num_serving(self) -> int:
        """API workers that serve."""
        return sum(self._words[_HEADER_WORDS::_WORKER_WORDS])

    @property
    def total_active(self) -> int:
        """Requests that all API workers are answering."""
        return sum(self._words[_HEADER_WORDS + 1 :: _WORKER_WORDS])
