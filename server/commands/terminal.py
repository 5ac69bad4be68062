"""What comes from the terminal and goes to it, or to the file or pipe that stands there: text, and Ctrl-C."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TextIO

from jaxllm import JaxLLMError


class OutputError(JaxLLMError):
    """Answers cannot be written any more: the disk is full, the file was deleted, stdout is closed."""


def set_up_streams() -> None:
    """Before the first output: nothing that is printed raises because of its characters.

    What the encoding cannot show is escaped. Lines of stdin end with LF alone; bytes that are not of its encoding are
    for `as_text`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # It was closed when we came; no file that we open is to get its number.
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, _Closed() if name == "stdout" else os.fdopen(number, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape", newline="\n")


def as_text(given: str) -> str:
    """An argument or a line of stdin. What the locale could not decode is UTF-8. Raises ValueError if it is not."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return os.fsencode(given).decode("utf-8")
    return given


def show(text: str) -> None:
    """Prints a piece of an answer, at once. Raises OutputError, or BrokenPipeError if the reader has left."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _silence(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"stdout cannot be written: {error.strerror}") from error


def print_stream[Result](pieces: Generator[str, None, Result]) -> Result | None:
    """Prints an answer while it comes. Returns what the generator does, or None if Ctrl-C has stopped it."""
    with closing(pieces), first_interrupt() as has_come:
        while not has_come():
            try:
                piece = next(pieces)
            except StopIteration as end:
                return end.value
            show(piece)
    return None


@contextmanager
def first_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has come. The first one interrupts nothing, so that no step is torn; the second does."""
    has_come = False

    def handle(signal_number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: has_come
    finally:
        signal.signal(signal.SIGINT, previous)


def note(text: str, *, end: str = "\n") -> None:
    """Prints what is not part of an answer: to stderr, so that answers can be piped. If nobody can read it, it is
    lost, and the answer is not."""
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


class _Closed(io.TextIOBase):
    """A stdout that is not there."""

    def write(self, text: str) -> int:
        raise OSError(None, "it is closed")


def _silence(stream: TextIO) -> None:
    """What it still holds, and whatever comes, goes nowhere: Python writes it when it ends."""
    with contextlib.suppress(OSError):  # It has no number.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
