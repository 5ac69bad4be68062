"""What Prometheus reads at /metrics, under the names that dashboards and gateways know from vLLM.

Two sources: the engine's own statistics, which are read when somebody asks, and what the HTTP workers count of
their requests. With several workers the counts lie in files that all map (`SharedCounts`), so that any worker
answers for the whole server.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxllm.server.observability.engine_metrics import ENGINE, LABELS, Values, engine_metrics
from jaxllm.server.observability.recent import Recent, summarize
from jaxllm.server.observability.shared_counts import SharedCounts

if TYPE_CHECKING:
    from jaxllm import AsyncLLM
    from jaxllm.server.observability.finished_request import FinishedRequest
    from jaxllm.server.server_config import ServerConfig

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_HISTOGRAMS: Mapping[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (_TTFT_S, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_TOKEN_S, "Time between tokens of a request."),
    "request_time_per_output_token_seconds": (_TOKEN_S, "Mean time per token after the first, of each request."),
    "e2e_request_latency_seconds": (_REQUEST_S, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_REQUEST_S, "From a request's arrival to its first step."),
    "request_prefill_time_seconds": (_REQUEST_S, "From a request's first step to its first token."),
    "request_decode_time_seconds": (_REQUEST_S, "From a request's first token to its end."),
    "request_inference_time_seconds": (_REQUEST_S, "From a request's first step to its end."),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of each request."),
    "request_generation_tokens": (_TOKENS, "Generated tokens of each request, all choices together."),
    "request_max_num_generation_tokens": (_TOKENS, "Tokens that each request generated, in its longest choice."),
    "request_params_max_tokens": (_TOKENS, "The most tokens that each request asked for."),
    "request_params_n": ((1, 2, 5, 10, 20), "Choices that each request asked for."),
}
_ALSO_KNOWN_AS = {"inter_token_latency_seconds": "time_per_output_token_seconds"}  # what dashboards before 2026 read
_TOKEN_COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Prompt tokens of requests that reached their first token.",
    "generation_tokens": "Tokens that the engine has generated, those included that nobody waited for.",
    "prompt_tokens_cached": "Those of the prompt tokens that the prefix cache had.",
}
_GENERATION_TOKENS = list(_TOKEN_COUNTERS).index("generation_tokens")  # the places of these come first
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
STATUSES = (400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 417, 422, 429, 431, 499, 500, 501, 503, 504, 505)
_REFUSED_CONNECTIONS = "refused_connections"


class _Histogram:
    """Counts of values by bucket, then the sum of the values, in the numbers from `start` on."""

    def __init__(self, vector: "memoryview[float]", start: int, bounds: Sequence[float]) -> None:
        self._vector = vector
        self._start = start
        self._bounds = bounds
        self.end = start + len(bounds) + 2  # the bucket above the last bound, and the sum

    def observe(self, value: float, count: int = 1) -> None:
        self._vector[self._start + bisect_left(self._bounds, value)] += count
        self._vector[self.end - 1] += value * count

    def family(self, name: str, text: str, totals: Sequence[float], model_name: str) -> HistogramMetricFamily:
        cumulative, buckets = 0.0, []
        for bound, count in zip((*self._bounds, float("inf")), totals[self._start : self.end - 1], strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), cumulative))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric((model_name, ENGINE), buckets, totals[self.end - 1])
        return family


class Metrics(Collector):
    """Counts what requests do, and tells Prometheus and the live view.

    Args:
        llm: whose statistics are shown beside the counts.
        config: has the prefix of every name and the model's name, which is a label of every metric.
        shared_folder: see `SharedCounts`; only with several HTTP workers.
    """

    def __init__(self, llm: "AsyncLLM", config: "ServerConfig", shared_folder: Path | None = None) -> None:
        self._llm = llm
        self._model_name = config.served_model_name[0] if config.served_model_name else llm.info.model
        self._prefix = config.metrics_prefix
        names = [*_TOKEN_COUNTERS, *FINISH_REASONS, *map(str, STATUSES), _REFUSED_CONNECTIONS]
        self._places = {name: place for place, name in enumerate(names)}
        recent_start = len(names) + sum(len(bounds) + 2 for bounds, _ in _HISTOGRAMS.values())
        self._counts = SharedCounts(recent_start + Recent.SIZE, shared_folder)
        self._own = self._counts.own
        self._histograms: dict[str, _Histogram] = {}
        start = len(names)
        for name, (bounds, _) in _HISTOGRAMS.items():
            self._histograms[name] = histogram = _Histogram(self._own, start, bounds)
            start = histogram.end
        self._recent = Recent(self._own[recent_start:])
        self._recent_start = recent_start
        self._token_gaps = self._histograms["inter_token_latency_seconds"]
        llm.on_tokens = self._count_tokens
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def first_token(self, ttft_s: float, num_prompt_tokens: int) -> None:
        """Counts that a request's prompt has been read: its first choice has its first token."""
        self._own[self._places["prompt_tokens"]] += num_prompt_tokens
        self._histograms["time_to_first_token_seconds"].observe(ttft_s)
        self._recent.add(time.monotonic(), "ttft", ttft_s)

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Takes down when tokens of one choice came, together.

        gap_s: seconds since those before them; None for the first ones.
        """
        itl_s = None if gap_s is None else gap_s / num_tokens
        if itl_s is not None:
            self._token_gaps.observe(itl_s, num_tokens)
        self._recent.add_tokens(time.monotonic(), num_tokens, itl_s)

    def request_finished(self, request: "FinishedRequest") -> None:
        """Counts a request that has ended."""
        for reason in request.finish_reasons:
            self._own[self._places[reason]] += 1
        for name, value in (
            ("request_time_per_output_token_seconds", request.tpot_s),
            ("e2e_request_latency_seconds", request.e2e_s),
            ("request_queue_time_seconds", request.queue_s),
            ("request_prefill_time_seconds", request.prefill_s),
            ("request_decode_time_seconds", request.decode_s),
            ("request_inference_time_seconds", request.inference_s),
            ("request_prompt_tokens", request.num_prompt_tokens),
            ("request_generation_tokens", request.num_output_tokens),
            ("request_max_num_generation_tokens", max(request.output_lens, default=0)),
            ("request_params_max_tokens", request.params.max_tokens),
            ("request_params_n", request.params.n),
        ):
            if value is not None:
                self._histograms[name].observe(value)
        self._own[self._places["prompt_tokens_cached"]] += request.num_cached_tokens
        if request.tpot_s is not None:
            self._recent.add(time.monotonic(), "tpot", request.tpot_s)

    def refused(self, status: int) -> None:
        """Counts an answer with an error status, whatever it was an answer to."""
        if (place := self._places.get(str(status))) is not None:
            self._own[place] += 1

    def connection_refused(self) -> None:
        """Counts a connection that came when file descriptors were short."""
        self._own[self._places[_REFUSED_CONNECTIONS]] += 1

    def text(self) -> bytes:
        """The page for Prometheus, in its text format 0.0.4."""
        return generate_latest(self._registry)

    def recent(self) -> Mapping[str, object]:
        """Latencies and rates of the last minute: see `recent.summarize`."""
        return summarize(self._counts.read()[:, self._recent_start :], time.monotonic())

    def collect(self) -> Iterator[Metric]:
        """What `text` shows; called by the registry."""
        totals = self._counts.read().sum(axis=0).tolist()
        for name, text in _TOKEN_COUNTERS.items():
            yield self._counter(name, text, (), {(): totals[self._places[name]]})
        by_reason: Values = {(reason,): totals[self._places[reason]] for reason in FINISH_REASONS}
        yield self._counter("request_success", "Ended requests, by reason.", ("finished_reason",), by_reason)
        by_status: Values = {(str(status),): totals[self._places[str(status)]] for status in STATUSES}
        yield self._counter("request_refusals", "Answers with an error, by HTTP status.", ("status",), by_status)
        text = "Connections that were refused since file descriptors were short."
        yield self._counter(_REFUSED_CONNECTIONS, text, (), {(): totals[self._places[_REFUSED_CONNECTIONS]]})
        for name, (_, text) in _HISTOGRAMS.items():
            for known_as in (name, _ALSO_KNOWN_AS.get(name)):
                if known_as:
                    yield self._histograms[name].family(self._prefix + known_as, text, totals, self._model_name)
        yield from engine_metrics(self._llm, self._prefix, self._model_name)

    def _count_tokens(self, num_tokens: int) -> None:
        """Counts what the engine has made, whatever became of it."""
        self._own[_GENERATION_TOKENS] += num_tokens

    def _counter(self, name: str, text: str, labels: Sequence[str], values: Values) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, text, labels=(*LABELS, *labels))
        for label_values, value in values.items():
            family.add_metric((self._model_name, ENGINE, *label_values), value)
        return family
