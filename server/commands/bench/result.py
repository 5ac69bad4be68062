"""What a benchmark found: percentiles, throughput, goodput, and whether the client was good enough to tell."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.server.commands.bench.load import Measured, Sample

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
MAX_CLIENT_CPU, MAX_LAG_S, MAX_LAG_SHARE = 0.8, 0.01, 0.05
"""Beyond these the client distorts what it measures; the share is of the median TTFT."""


@dataclass(frozen=True)
class Result:
    """One load on one server.

    label: what tells it from others of the same run, such as "4 requests/s".
    slo_ms: bounds on ttft, tpot, itl (a request's mean) or e2e, in milliseconds; a request that keeps all is good.
    """

    label: str
    measured: Measured
    slo_ms: Mapping[str, float]

    @property
    def ok(self) -> list[Sample]:
        return [sample for sample in self.measured.samples if sample.error is None]

    @property
    def seconds(self) -> float:
        """From the first request's time to the end of the last answer."""
        samples = self.measured.samples
        return max(sample.end_s for sample in samples) - min(sample.due_s for sample in samples)

    def latencies_s(self, name: str) -> list[float]:
        """Of the requests that succeeded, in seconds; "itl" has each gap of each request."""
        if name == "itl":
            return [gap for sample in self.ok for gap in sample.gaps_s]
        values = (getattr(sample, f"{name}_s") for sample in self.ok)
        return [value for value in values if value is not None]

    def num_good(self) -> int:
        """Requests that succeeded and kept every bound."""
        return sum(all(_latency_ms(sample, name) <= bound for name, bound in self.slo_ms.items()) for sample in self.ok)

    def warnings(self) -> list[str]:
        """Why the figures may not be what they seem."""
        found = []
        cost = self.measured.cost
        lag_s = float(np.percentile(cost.lag_s, 99)) if cost.lag_s else 0.0
        ttft_s = float(np.median(self.latencies_s("ttft") or [0.0]))
        if cost.cpu > MAX_CLIENT_CPU or lag_s > max(MAX_LAG_S, MAX_LAG_SHARE * ttft_s):
            found.append(
                f"the client may be the bottleneck: it used {cost.cpu:.0%} of a core, and its event loop was up to "
                f"{1e3 * lag_s:.0f} ms late (p99). Run it on another machine, or several with a part of the load each."
            )
        if any(not sample.has_usage for sample in self.ok):
            found.append("the server sends no usage: output tokens are counted as events, prompt tokens are unknown")
        if short := sum(
            sample.has_usage and sample.num_output_tokens < sample.request.output_len for sample in self.ok
        ):
            found.append(f"{short:,} answers ended before their wanted length")
        for error, count in Counter(sample.error for sample in self.measured.samples if sample.error).most_common(3):
            found.append(f"{count:,} requests failed: {error}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Latencies in milliseconds."""
        ok, seconds = self.ok, self.seconds
        num_output_tokens = sum(sample.num_output_tokens for sample in ok)
        num_prompt_tokens = sum(sample.num_prompt_tokens for sample in ok)
        lag_s = self.measured.cost.lag_s
        return {
            "label": self.label,
            "started_at": round(self.measured.started_at, 3),
            "seconds": seconds,
            "num_requests": len(self.measured.samples),
            "num_ok": len(ok),
            "num_prompt_tokens": num_prompt_tokens,
            "num_cached_tokens": sum(sample.num_cached_tokens for sample in ok),
            "num_output_tokens": num_output_tokens,
            "requests_per_s": len(ok) / seconds,
            "prompt_tokens_per_s": num_prompt_tokens / seconds,
            "output_tokens_per_s": num_output_tokens / seconds,
            **{f"{name}_ms": spread_ms(self.latencies_s(name)) for name in LATENCIES},
            "goodput": {
                "slo_ms": dict(self.slo_ms),
                "requests_per_s": self.num_good() / seconds,
                "share": self.num_good() / len(self.measured.samples),
            }
            if self.slo_ms
            else None,
            "client": {"cpu_share": self.measured.cost.cpu, "lag_ms": spread_ms(lag_s)},
            "warnings": self.warnings(),
            "requests": [_sample_dict(sample) for sample in self.measured.samples],
        }


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None of nothing."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    percentiles = dict(zip((f"p{p}" for p in PERCENTILES), np.percentile(values, PERCENTILES), strict=True))
    found = {"mean": values.mean(), **percentiles, "max": values.max()}
    return {name: round(float(value), 3) for name, value in found.items()}


def table(results: Sequence[Result]) -> str:
    """A column for each result."""
    rows: dict[str, list[str]] = {}
    for column, result in enumerate(results):
        for name, cell in _cells(result):
            rows.setdefault(name, ["-"] * len(results))[column] = cell
    label_width = max(map(len, rows))
    widths = [
        max(len(result.label), *(len(cells[column]) for cells in rows.values())) + 2
        for column, result in enumerate(results)
    ]
    lines = [" " * label_width + "".join(f"{r.label:>{w}}" for r, w in zip(results, widths, strict=True))]
    for name, cells in rows.items():
        lines.append(f"{name:{label_width}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def _cells(result: Result) -> Iterable[tuple[str, str]]:
    figures = result.as_dict()
    yield "requests succeeded", f"{figures['num_ok']:,} of {figures['num_requests']:,}"
    yield "seconds", f"{figures['seconds']:,.1f}"
    yield "requests/s", f"{figures['requests_per_s']:,.2f}"
    yield "output tokens/s", f"{figures['output_tokens_per_s']:,.1f}"
    if figures["num_prompt_tokens"]:
        yield "prompt tokens/s", f"{figures['prompt_tokens_per_s']:,.1f}"
        num_ok = figures["num_ok"]
        lens = (figures["num_prompt_tokens"] / num_ok, figures["num_output_tokens"] / num_ok)
        yield "mean tokens in, out", f"{lens[0]:,.0f}, {lens[1]:,.0f}"
        yield "prompt tokens from cache", f"{figures['num_cached_tokens'] / figures['num_prompt_tokens']:.0%}"
    if num_events := sum(sample.num_events for sample in result.ok):
        yield "output tokens in an event", f"{figures['num_output_tokens'] / num_events:.2f}"
    for name in LATENCIES:
        if spread := figures[f"{name}_ms"]:
            shown = " ".join(_number(spread[f"p{p}"]) for p in PERCENTILES)
            yield f"{name.upper()} {' '.join(f'p{p}' for p in PERCENTILES)}, ms", shown
    tenants = sorted({sample.request.tenant for sample in result.ok})
    for tenant in tenants if len(tenants) > 1 else ():
        own = [sample.ttft_s for sample in result.ok if sample.request.tenant == tenant and sample.ttft_s is not None]
        if spread := spread_ms(own):
            shown = " ".join(_number(spread[f"p{p}"]) for p in PERCENTILES)
            yield f"  TTFT of tenant {tenant or '(none)'}", shown
    if goodput := figures["goodput"]:
        bounds = ", ".join(f"{name.upper()} ≤ {bound:g}" for name, bound in result.slo_ms.items())
        yield f"goodput ({bounds} ms), 1/s", f"{goodput['requests_per_s']:.2f} ({goodput['share']:.0%})"
    yield "client: CPU of a core", f"{figures['client']['cpu_share']:.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _latency_ms(sample: Sample, name: str) -> float:
    if name == "itl":
        return 1e3 * float(np.mean(sample.gaps_s)) if sample.gaps_s else 0.0
    return 1e3 * (getattr(sample, f"{name}_s") or 0.0)


def _sample_dict(sample: Sample) -> dict[str, Any]:
    ttft_s, tpot_s = sample.ttft_s, sample.tpot_s
    return {
        "due_s": round(sample.due_s, 6),
        "sent_s": round(sample.sent_s, 6),
        "ttft_s": None if ttft_s is None else round(ttft_s, 6),
        "tpot_s": None if tpot_s is None else round(tpot_s, 6),
        "e2e_s": round(sample.e2e_s, 6),
        "prompt_tokens": sample.num_prompt_tokens,
        "output_tokens": sample.num_output_tokens,
        "tenant": sample.request.tenant,
        "error": sample.error,
    }
