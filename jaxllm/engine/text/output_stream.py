"""The deltas of one request, for one reader."""

import asyncio
import contextlib
from collections.abc import Callable

from jaxllm.outputs import OutputDelta

_MAX_DELTAS = 64  # of one continuation, that wait for the reader; more are merged


class OutputStream:
    """An asynchronous iterator of what is new, of all continuations of a request; it ends when all have ended.

    What comes while nobody reads merges into one delta for each continuation. Leaving early is a matter of `aclose`;
    a reader that is cancelled, and a stream that nobody holds any more, do the same.

    Leaving does not unmake what was made: the engine ends the request and tells its last tokens and its end, and who
    keeps books may `take` them, without text, until `is_complete`.

    Where many streams get their tokens at once, a reader need not be a task that is woken: it may set `on_news` and
    `take` what there is.

    request_id: as given to `AsyncLLM.submit`, or made there.
    on_news: called, while the engine's message is taken in, when there is something to take or nothing more will come.
    """

    def __init__(self, request_id: str, handles: list[int], leave: "Callable[[list[int], OutputStream | None], None]"):
        """leave: called when the reader leaves before the end, perhaps from another thread: with the handles, and with
        the stream if somebody has it."""
        self.request_id = request_id
        self.on_news: Callable[[], None] = _nobody
        self._handles = handles
        self._leave = leave
        self._pending: dict[int, list[OutputDelta]] = {}  # by the continuation
        self._num_unfinished = len(handles)
        self._is_closed = False

    @property
    def is_complete(self) -> bool:
        """Whether all has come that will come, read or not."""
        return not self._num_unfinished

    def take(self) -> OutputDelta | None:
        """What is new of one continuation, until there is nothing (None)."""
        if not self._pending:
            return None
        return OutputDelta.joined(self._pending.pop(next(iter(self._pending))))

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._is_closed:
            if (delta := self.take()) is not None:
                return delta
            if not self._num_unfinished:
                break
            await self._wait()
        raise StopAsyncIteration

    def close(self) -> None:
        """Leaves: the request is aborted, and who waits for a delta hears that there are no more."""
        is_first, self._is_closed = not self._is_closed, True
        if is_first and self._num_unfinished:
            self._leave(self._handles, self)
        self.on_news()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def abandon(self) -> None:
        """The engine has not taken the request in; nothing is to be told to anybody."""
        self._num_unfinished = 0

    def push(self, delta: OutputDelta) -> None:
        """Something new, from the engine."""
        deltas = self._pending.setdefault(delta.index, [])
        deltas.append(delta)
        if len(deltas) > _MAX_DELTAS:
            deltas[:] = [OutputDelta.joined(deltas)]
        self._num_unfinished -= delta.finish_reason is not None
        self.on_news()

    async def _wait(self) -> None:
        assert self.on_news is _nobody, "a stream has one reader"
        news = asyncio.Event()
        self.on_news = news.set
        try:
            await news.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self.on_news = _nobody

    def __del__(self) -> None:
        if getattr(self, "_num_unfinished", 0) and not self._is_closed:
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and with it everything
                self._leave(self._handles, None)


def _nobody() -> None:
    """Nobody waits for news."""
