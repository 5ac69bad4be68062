"""Numbers that every HTTP worker adds to and any of them can report for all."""

import mmap
import os
from pathlib import Path

import numpy as np


class SharedCounts:
    """A vector of float64 for each worker. A worker adds to its own; whoever is asked reads all of them.

    Each vector lies in a mapped file of a folder that the workers share. The file of a worker that died stays, so that
    counters never fall. A single worker needs no folder.

    Args:
        size: numbers in a vector; the same in each worker.
        folder: private to the server; None for a single worker.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        self._size = size
        self._folder = folder
        self.own: memoryview[float] = _map(folder / f"counts-{os.getpid()}", size) if folder else _memory(size)
        """This worker's vector: `own[i] += x` is all that counting costs."""

    def read(self) -> np.ndarray:
        """float64[num_workers, size], a copy."""
        if self._folder is None:
            return np.array(self.own)[None]
        vectors = [np.fromfile(path, np.float64, self._size) for path in sorted(self._folder.glob("counts-*"))]
        return np.stack([vector for vector in vectors if len(vector) == self._size])  # not one that is being made


def _memory(size: int) -> "memoryview[float]":
    return memoryview(bytearray(8 * size)).cast("d")


def _map(path: Path, size: int) -> "memoryview[float]":
    """The content of the file, made of zeros if it is new, as writable memory."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, 8 * size)
        return memoryview(mmap.mmap(file, 8 * size)).cast("d")
    finally:
        os.close(file)
