"""The engine's own statistics in Prometheus's terms."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxllm.scheduler import RequestStatus

if TYPE_CHECKING:
    from jaxllm import AsyncLLM, EngineInfo, EngineStats
    from jaxllm.scheduler import SchedulerStats

Values = dict[tuple[str, ...], float]  # by the labels beside those of every metric

LABELS = ("model_name", "engine")
"""Of every metric. vLLM numbers its engines; ours is always the first."""

ENGINE = "0"

WAITING_REASONS = {
    RequestStatus.WAITING: "capacity",  # for a row, for pages or for room in a step: vLLM's word
    RequestStatus.WAITING_FOR_INPUT: "input",
    RequestStatus.WAITING_FOR_PAGES: "pages_from_host",
    RequestStatus.PREEMPTED: "preempted",
}


def kv_cache_usage(stats: "SchedulerStats") -> float:
    """The part of the KV cache that running requests hold, from 0 to 1."""
    return stats.num_used_pages / max(1, stats.num_used_pages + stats.num_free_pages)


def engine_metrics(llm: "AsyncLLM", prefix: str, model_name: str) -> Iterator[Metric]:
    """Of the latest snapshot. An engine that was started again counts from 0, which Prometheus expects of counters."""
    maker = _Maker(prefix, model_name)
    yield maker.gauge("engine_up", "1 while the engine takes requests.", float(llm.state == "ready"))
    yield maker.gauge("engine_heartbeat_age_seconds", "Since the engine last told how it is.", llm.heartbeat_age_s)
    yield maker.counter("engine_losses", "How often the engine died, and with it its requests.", llm.num_restarts)
    yield _cache_config(llm.info, maker)
    stats = llm.stats
    yield from _requests(stats.scheduler, maker)
    yield from _kv_cache(stats.scheduler, maker)
    yield from _steps(stats, maker)


def _cache_config(info: "EngineInfo", maker: "_Maker") -> Metric:
    """Under vLLM's labels: its blocks are our pages."""
    labels = {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages - 1),  # without the null page
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": str(info.enable_prefix_caching),
    }
    family = GaugeMetricFamily(
        f"{maker.prefix}cache_config_info", "How the KV cache is made.", labels=(*LABELS, *labels)
    )
    family.add_metric((maker.model_name, ENGINE, *labels.values()), 1)
    return family


def _requests(stats: "SchedulerStats", maker: "_Maker") -> Iterator[Metric]:
    counts = stats.num_requests
    now: Values = {(status.value,): count for status, count in counts.items() if not status.is_finished}
    by_reason: Values = {(reason,): counts.get(status, 0) for status, reason in WAITING_REASONS.items()}
    yield maker.gauge("num_requests_running", "Requests in steps.", stats.num_running)
    yield maker.gauge("num_requests_waiting", "Requests that wait to be in a step.", stats.num_waiting)
    yield maker.gauges("num_requests_waiting_by_reason", "Requests that wait, by what for.", ("reason",), by_reason)
    yield maker.gauges("num_requests_by_state", "Requests by where they are.", ("state",), now)
    yield maker.gauge("num_queued_tokens", "Prompt tokens of the requests that wait.", stats.num_queued_tokens)
    yield maker.gauge("queue_age_seconds", "Since the oldest waiting request arrived.", stats.queue_age_s)


def _kv_cache(stats: "SchedulerStats", maker: "_Maker") -> Iterator[Metric]:
    pages: Values = {
        ("device", "used"): stats.num_used_pages,
        ("device", "cached"): stats.num_cached_pages,
        ("device", "free"): stats.num_free_pages - stats.num_cached_pages,
        ("host", "cached"): stats.num_host_pages,
    }
    moves: Values = {
        ("saved",): stats.num_saved_pages,
        ("loaded",): stats.num_loaded_pages,
        ("lost",): stats.num_lost_pages,
        ("failed",): stats.num_failed_pages,
    }
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        yield maker.gauge(name, "The part of the KV cache in use, from 0 to 1.", kv_cache_usage(stats))
    yield maker.gauges("kv_cache_pages", "Pages by tier. Cached ones are free, with content.", ("tier", "state"), pages)
    yield maker.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_query_tokens)
    yield maker.counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_prefix_hit_tokens)
    yield maker.counter("num_preemptions", "Requests that gave their pages to others.", stats.num_preemptions)
    yield maker.counter("recomputed_tokens", "Tokens computed again after that.", stats.num_recomputed_tokens)
    yield maker.counters("page_moves", "Pages saved to the host, and what became of them.", ("move",), moves)
    yield maker.counter("page_stalls", "Times that the device had nothing to do but wait for pages.", stats.num_stalls)
    yield maker.counter("page_stall_seconds", "How long it waited for them.", stats.stall_s)


def _steps(stats: "EngineStats", maker: "_Maker") -> Iterator[Metric]:
    scheduler, tokens = stats.scheduler, stats.scheduler.all_steps
    by_kind: Values = {
        ("decode",): tokens.num_decode_tokens,
        ("prefill",): tokens.num_prefill_tokens,
        ("draft",): tokens.num_draft_tokens,
        ("padding",): stats.num_padded_tokens,
    }
    yield maker.counter("steps", "Steps of the engine.", stats.num_steps)
    yield maker.counter("step_host_seconds", "Time that steps took on the host.", stats.host_s)
    yield maker.counter("step_device_wait_seconds", "Time that the host waited for the device.", stats.device_wait_s)
    num_tokens = sum(by_kind.values()) - stats.num_padded_tokens
    yield maker.histogram("iteration_tokens_total", "Tokens of each step.", scheduler.steps_by_size, num_tokens)
    yield maker.counters("batch_tokens", "Tokens of steps, by kind; padding is waste.", ("kind",), by_kind)
    yield maker.counter("batch_budget_tokens", "Tokens that the steps had room for.", tokens.num_budget_tokens)
    yield maker.counter("accepted_draft_tokens", "Drafted tokens that were right.", scheduler.num_accepted_tokens)
    for name, text, value in (
        ("device_memory_bytes", "Memory of the first device in use.", stats.memory_bytes),
        ("device_memory_limit_bytes", "Memory that the first device has.", stats.memory_limit_bytes),
    ):
        if value is not None:
            yield maker.gauge(name, text, value)
    yield maker.counter(
        "unsound_requests", "Requests that ended because their logits were NaN or infinite.", stats.num_unsound
    )
    yield maker.counter(
        "compilations_after_start", "Programs compiled in service; any is a fault.", stats.num_compilations_after_start
    )


class _Maker:
    """Makes families with the prefix and the labels of every metric."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.prefix = prefix
        self.model_name = model_name

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self._fill(GaugeMetricFamily(self.prefix + name, text, labels=LABELS), {(): value})

    def gauges(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        return self._fill(GaugeMetricFamily(self.prefix + name, text, labels=(*LABELS, *labels)), values)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self._fill(CounterMetricFamily(self.prefix + name, text, labels=LABELS), {(): value})

    def counters(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        return self._fill(CounterMetricFamily(self.prefix + name, text, labels=(*LABELS, *labels)), values)

    def histogram(self, name: str, text: str, counts: Sequence[int], total: float) -> Metric:
        """`counts`: by powers of two, as in `SchedulerStats.steps_by_size`; `total`: the sum of what was counted."""
        buckets, num_up_to = [], 0
        for exponent, count in enumerate(counts):
            num_up_to += count
            buckets.append((str(float(2**exponent)), float(num_up_to)))
        family = HistogramMetricFamily(self.prefix + name, text, labels=LABELS)
        family.add_metric((self.model_name, ENGINE), [*buckets, ("+Inf", float(num_up_to))], total)
        return family

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for label_values, value in values.items():
            family.add_metric((self.model_name, ENGINE, *label_values), value)
        return family
