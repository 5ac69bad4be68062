"""An HTTP client that does nothing but count: for a server that is measured on the same cores.

It looks for the marks of events and of the ends of answers in the bytes, and parses nothing.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Counts:
    """Of all connections together. seconds: until the last answer has ended."""

    num_answers: int = 0
    num_events: int = 0
    num_bytes: int = 0
    num_reads: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


def request_bytes(url: str, path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """Sends one request after the other. `streams`: the answers come in chunks, and else with a length."""

    def __init__(self, counts: Counts, streams: bool) -> None:
        self._counts, self._streams = counts, streams
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def ask(self, request: bytes) -> None:
        """Until the answer has ended. Raises RuntimeError unless its status is 200."""
        self._ended = asyncio.get_running_loop().create_future()
        self._tail, self._missing, self._sent = b"", None, time.perf_counter()
        self._has_begun = self._has_event = False
        self._transport.write(request)  # type: ignore[attr-defined]
        await self._ended
        self._counts.num_answers += 1
        self._counts.whole_s.append(time.perf_counter() - self._sent)

    def data_received(self, data: bytes) -> None:
        counts = self._counts
        counts.num_reads += 1
        counts.num_bytes += len(data)
        if not self._has_begun:
            self._has_begun = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._end(RuntimeError(data[:400].decode(errors="replace")))
                return
            if not self._streams:
                head, _, body = data.partition(b"\r\n\r\n")
                self._missing = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0])
                data = body
        if self._missing is not None:
            self._missing -= len(data)
            if self._missing == 0:
                self._end()
            return
        num_events = data.count(b"data: ")
        if num_events and not self._has_event:
            self._has_event = True
            counts.first_s.append(time.perf_counter() - self._sent)
        counts.num_events += num_events
        self._tail = (self._tail + data)[-len(LAST_CHUNK) - 2 :]
        if self._tail.endswith(b"\n" + LAST_CHUNK):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RuntimeError("the server has hung up"))

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


async def closed_loop(url: str, requests: Iterator[bytes], concurrency: int, *, streams: bool) -> Counts:
    """All requests, so many at once."""
    counts = Counts()
    connections = await _connect(url, concurrency, counts, streams)
    start = time.perf_counter()

    async def work(connection: Connection) -> None:
        for request in requests:
            await connection.ask(request)

    await asyncio.gather(*map(work, connections))
    counts.seconds = time.perf_counter() - start
    return counts


async def open_loop(url: str, requests: Sequence[bytes], due_s: Sequence[float], *, streams: bool) -> Counts:
    """Each request when it is due; its times count from then. A connection is taken from those that are free."""
    counts = Counts()
    free = await _connect(url, 16, counts, streams)
    start = time.perf_counter()

    async def ask(request: bytes) -> None:
        connection = free.pop() if free else (await _connect(url, 1, counts, streams))[0]
        await connection.ask(request)
        free.append(connection)

    async with asyncio.TaskGroup() as group:
        for request, due in zip(requests, due_s, strict=True):
            if (wait_s := start + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(ask(request))
    counts.seconds = time.perf_counter() - start
    return counts


async def _connect(url: str, number: int, counts: Counts, streams: bool) -> list[Connection]:
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    made: Callable[[], Connection] = lambda: Connection(counts, streams)  # noqa: E731
    return [(await loop.create_connection(made, parts.hostname, parts.port))[1] for _ in range(number)]
