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

    request_id: as given to `AsyncLLM.submit`, or made there.
    """

    def __init__(self, request_id: str, handles: list[int], leave: Callable[[list[int]], None]):
        """leave: called with the handles when the reader leaves before the end, perhaps from another thread."""
        self.request_id = request_id
        self._handles = handles
        self._leave = leave
        self._pending: dict[int, list[OutputDelta]] = {}  # by the continuation
        self._num_unfinished = len(handles)
        self._reader: asyncio.Future[None] | None = None
        self._waits_for_end = False

    @property
    def is_complete(self) -> bool:
        """Whether all has come that will come, read or not."""
        return not self._num_unfinished

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._pending:
            if not self._num_unfinished:
                raise StopAsyncIteration
            await self._wait()
        index = next(iter(self._pending))
        return _merged(self._pending.pop(index))

    async def collect(self) -> list[OutputDelta]:
        """Waits for the end. Returns all that was not read yet, as one delta for each continuation.

        One that the reader has left, or that it has read to its end, is not among them.
        """
        self._waits_for_end = True
        while self._num_unfinished:
            await self._wait()
        pending, self._pending = self._pending, {}
        return [_merged(pending[index]) for index in sorted(pending)]

    async def aclose(self) -> None:
        """Leaves: the request is aborted, and who waits for a delta hears that there are no more."""
        self._close()

    def abandon(self) -> None:
        """The engine has not taken the request in; nothing is to be told to anybody."""
        self._num_unfinished = 0

    def push(self, delta: OutputDelta) -> None:
        """Something new, from the engine."""
        if not self._num_unfinished:  # the reader has left
            return
        deltas = self._pending.setdefault(delta.index, [])
        deltas.append(delta)
        if len(deltas) > _MAX_DELTAS:
            deltas[:] = [_merged(deltas)]
        self._num_unfinished -= delta.finish_reason is not None
        if not self._waits_for_end or not self._num_unfinished:
            self._wake()

    async def _wait(self) -> None:
        assert self._reader is None, "a stream has one reader"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        except asyncio.CancelledError:
            self._close()
            raise
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _close(self) -> None:
        if self._num_unfinished:
            self._num_unfinished = 0
            self._leave(self._handles)
        self._pending.clear()
        self._wake()

    def __del__(self) -> None:
        if getattr(self, "_num_unfinished", 0):
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and with it everything
                self._leave(self._handles)


def _merged(deltas: list[OutputDelta]) -> OutputDelta:
    """One delta for several of a continuation, in order."""
    if len(deltas) == 1:
        return deltas[0]
    last, logprobs = deltas[-1], None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [token for delta in deltas for token in delta.logprobs or ()]
    return OutputDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        metrics=last.metrics,
        error=last.error,
    )
