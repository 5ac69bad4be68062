"""Sends the requests of a benchmark, and notes when each piece of each answer came."""

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from jaxllm.server.commands.bench.endpoint import Endpoint, Usage, read_event
from jaxllm.server.commands.bench.workload import BenchRequest
from jaxllm.server.commands.client.http_client import HttpClient
from jaxllm.server.commands.client.http_response import TransportError
from jaxllm.server.commands.client.sse_reader import SseReader

LAG_INTERVAL_S = 0.02


@dataclass(slots=True)
class Sample:
    """What came of a request. Times in seconds from the start of the load.

    due_s: when it was to be sent: in an open loop its arrival, however late the client was; else when it was sent.
    first_s, last_s: the first and the last event with text in it.
    end_s: the end of the answer.
    gaps_s: between events with text.
    num_output_tokens: as the server counts, or the number of events with text if it sends no usage.
    """

    request: BenchRequest
    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first. None for a single token."""
        if self.first_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def num_events(self) -> int:
        return 0 if self.first_s is None else 1 + len(self.gaps_s)


@dataclass(frozen=True)
class ClientCost:
    """What the client itself took, and whether it kept up.

    cpu: the part of one core that this process used, its event loop being all that works in it.
    lag_s: how late the event loop was to wake up, each 20 ms.
    """

    cpu: float
    lag_s: list[float]


@dataclass(frozen=True)
class Measured:
    """A load that has been measured. started_at: Unix time."""

    started_at: float
    seconds: float
    samples: list[Sample]
    cost: ClientCost


class Load:
    """A way to one server: its clients and its endpoint.

    clients: by tenant; "" is for all that have none of their own.
    timeout_s: of a whole request.
    """

    def __init__(self, endpoint: Endpoint, clients: Mapping[str, HttpClient], timeout_s: float) -> None:
        self._endpoint, self._clients, self._timeout_s = endpoint, clients, timeout_s

    async def measure(
        self,
        requests: Sequence[BenchRequest],
        prompts: Iterable[str | list[int]],
        *,
        concurrency: int | None,
        progress: "Progress",
    ) -> Measured:
        """concurrency: so many at once, each sent when one before it has ended; None: each when it is due."""
        pairs = zip(requests, prompts, strict=True)
        bodies = [self._endpoint.body(prompt, request.output_len) for request, prompt in pairs]
        gc.collect()
        gc.freeze()  # A full collection over all prompts would be a pause.
        started_at, cpu_start, start = time.time(), time.process_time(), time.perf_counter()
        lags: list[float] = []
        watch = asyncio.create_task(_watch_lag(lags))
        try:
            if concurrency is None:
                samples = await self._open(requests, bodies, start, progress)
            else:
                samples = await self._closed(requests, bodies, start, concurrency, progress)
        finally:
            watch.cancel()
            gc.unfreeze()
        seconds = time.perf_counter() - start
        cost = ClientCost((time.process_time() - cpu_start) / seconds, lags)
        return Measured(started_at, seconds, samples, cost)

    async def _open(
        self, requests: Sequence[BenchRequest], bodies: Sequence[bytes], start: float, progress: "Progress"
    ) -> list[Sample]:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, body in zip(requests, bodies, strict=True):
                due_s = request.due_s or 0.0
                if (wait_s := start + due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(group.create_task(self._send(Sample(request, due_s), body, start, progress)))
        return [task.result() for task in tasks]

    async def _closed(
        self,
        requests: Sequence[BenchRequest],
        bodies: Sequence[bytes],
        start: float,
        concurrency: int,
        progress: "Progress",
    ) -> list[Sample]:
        samples: list[Sample] = []
        work = zip(requests, bodies, strict=True)

        async def send_on() -> None:
            for request, body in work:
                sample = Sample(request, due_s=time.perf_counter() - start)
                samples.append(sample)
                await self._send(sample, body, start, progress)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(send_on())
        return samples

    async def _send(self, sample: Sample, body: bytes, start: float, progress: "Progress") -> Sample:
        reading = _Reading(sample, start)
        request = sample.request
        headers = {} if request.priority is None else {"x-priority": str(request.priority)}
        if request.timeout_s is not None:
            headers["x-timeout-s"] = str(request.timeout_s)
        client = self._clients.get(request.tenant, self._clients[""])
        sample.sent_s = time.perf_counter() - start
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await client.request("POST", self._endpoint.path, body, headers, on_body=reading)
            if response.status != 200:
                sample.error = response.error_text
        except TransportError as error:
            sample.error = str(error)
        except TimeoutError:
            sample.error = f"no end after {self._timeout_s:g} s"
        sample.end_s = time.perf_counter() - start
        reading.close()
        progress.done(sample)
        return sample


class Progress:
    """Told of each request that has ended."""

    def done(self, sample: Sample) -> None: ...


class _Reading:
    """Reads the stream of one answer into its sample."""

    def __init__(self, sample: Sample, start: float) -> None:
        self._sample, self._start = sample, start
        self._events = SseReader()
        self._usage: Usage | None = None

    def __call__(self, piece: bytes) -> None:
        now = time.perf_counter() - self._start
        sample = self._sample
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                continue
            try:
                event = read_event(data)
            except msgspec.DecodeError:
                sample.error = f"an event that is not as OpenAI's: {data[:200].decode(errors='replace')}"
                continue
            if event.error:
                message = event.error.get("message") if isinstance(event.error, dict) else None
                sample.error = f"in the stream: {message or event.error}"
            if event.has_text:
                if sample.first_s is None:
                    sample.first_s = now
                else:
                    sample.gaps_s.append(now - sample.last_s)
                sample.last_s = now
            if event.usage is not None:
                self._usage = event.usage

    def close(self) -> None:
        sample, usage = self._sample, self._usage
        if usage is not None:
            sample.has_usage = True
            sample.num_prompt_tokens, sample.num_cached_tokens = usage.prompt_tokens, usage.num_cached_tokens
            sample.num_output_tokens = usage.completion_tokens
        else:
            sample.num_output_tokens = sample.num_events
        if sample.error is None and sample.first_s is None:
            sample.error = "the answer had no event with text in it"


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(max(0.0, time.perf_counter() - before - LAG_INTERVAL_S))
