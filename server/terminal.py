"""A streamed answer on the terminal, and Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType


def print_stream[Result](pieces: Generator[str, None, Result]) -> Result | None:
    """Prints an answer while it comes. Returns what the generator does, or None if Ctrl-C has stopped it."""
    with closing(pieces), first_interrupt() as has_come:
        while not has_come():
            try:
                piece = next(pieces)
            except StopIteration as end:
                return end.value
            sys.stdout.write(piece)
            sys.stdout.flush()
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


def note(text: str) -> None:
    """Prints a line that is not part of an answer: to stderr, so that answers can be piped."""
    print(text, file=sys.stderr, flush=True)
