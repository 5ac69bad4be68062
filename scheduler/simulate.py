"""What a scheduler's settings do to a trace of requests, on a device that is a formula.

    python -m jaxllm.scheduler.simulate --example > trace.jsonl
    python -m jaxllm.scheduler.simulate trace.jsonl --policy fcfs fair --num-pages 1500

A line of the trace is a JSON object: arrival_s, prompt_tokens and output_tokens (numbers of them), and if wanted
tenant, priority, timeout_s, and prefix with prefix_tokens: requests of one prefix begin with that many same tokens.
With --num-host-pages, pages that are evicted go to the host and come back, us_per_page each, beside the steps.
A step takes fixed_ms + us_per_token · tokens + ns_per_kv_token · tokens whose keys and values it reads + ns_per_pair ·
pairs of a chunk's query and a key that it sees.
"""

import argparse
import json
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerBusyError
from jaxllm.scheduler.host_tier.page_moves import PageMoves
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.request_options import RequestOptions
from jaxllm.scheduler.sampled_tokens import SampledTokens
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.scheduling_options import POLICIES, RETURNS
from jaxllm.scheduler.stats import SchedulerStats
from jaxllm.scheduler.step_plan import StepPlan

_KEYS = {
    "arrival_s": (int, float),
    "prompt_tokens": int,
    "output_tokens": int,
    "tenant": str,
    "priority": int,
    "timeout_s": (int, float),
    "prefix": str,
    "prefix_tokens": int,
}
_VOCABULARY = 1 << 30


class TraceError(ValueError):
    """A line of the trace that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """How long a step takes, and the copy of a page between device and host."""

    fixed_ms: float = 8.0
    us_per_token: float = 20.0
    ns_per_kv_token: float = 40.0
    ns_per_pair: float = 0.0
    us_per_page: float = 400.0

    def seconds(self, plan: StepPlan) -> float:
        num_kv_tokens = int(plan.num_computed_tokens.sum()) + plan.num_tokens
        seconds = self.fixed_ms / 1e3 + self.us_per_token / 1e6 * plan.num_tokens
        return seconds + self.ns_per_kv_token / 1e9 * num_kv_tokens + self.ns_per_pair / 1e9 * plan.num_chunk_pairs


class _Link:
    """The copies between device and host, one after the other."""

    def __init__(self, scheduler: Scheduler, seconds_per_page: float) -> None:
        self._scheduler = scheduler
        self._seconds_per_page = seconds_per_page
        self._free_at = 0.0
        self._copies: deque[tuple[float, int | None, list[int]]] = deque()  # when done, ticket (None: saves), slots

    def begin(self, moves: PageMoves, now: float) -> None:
        saved_slots = [slot for _, slot in moves.saves]
        for ticket, slots in [*([(None, saved_slots)] if saved_slots else []), *moves.loads]:
            self._free_at = max(now, self._free_at) + self._seconds_per_page * len(slots)
            self._copies.append((self._free_at, ticket, slots))

    @property
    def next_done_at(self) -> float | None:
        return self._copies[0][0] if self._copies else None

    def finish(self, now: float) -> None:
        """Tells the scheduler of the copies that are done."""
        while self._copies and self._copies[0][0] <= now:
            _, ticket, slots = self._copies.popleft()
            if ticket is None:
                self._scheduler.pages_saved(slots, is_sound=True)
            else:
                self._scheduler.pages_loaded(ticket, len(slots), self._seconds_per_page * len(slots))


@dataclass(kw_only=True)
class Outcome:
    """What came of a trace. Times in seconds; a request that was refused or ended early has no TTFT or TPOT."""

    seconds: float = 0.0
    num_requests: int = 0
    num_finished: int = 0
    num_refused: int = 0
    num_timeouts: int = 0
    num_output_tokens: int = 0
    ttft_s: dict[str, float] = field(default_factory=dict)
    tpot_s: dict[str, float] = field(default_factory=dict)
    tenants: dict[str, str] = field(default_factory=dict)
    stats: SchedulerStats | None = None

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Requests a second that kept both bounds."""
        good = sum(ttft <= ttft_s and self.tpot_s.get(name, 0.0) <= tpot_s for name, ttft in self.ttft_s.items())
        return good / self.seconds if self.seconds else 0.0


def read_trace(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The trace. Raises TraceError, naming the line."""
    trace = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise TraceError(f"line {number} is {entry!r}; it must be an object")
        for name, value in entry.items():
            if name not in _KEYS:
                raise TraceError(f"line {number} has {name!r}; the names are {', '.join(_KEYS)}")
            if not isinstance(value, _KEYS[name]) or isinstance(value, bool):  # type: ignore[arg-type]
                raise TraceError(f"line {number}: {name} is {value!r}, of a wrong type")
        for name in ("arrival_s", "prompt_tokens", "output_tokens"):
            if name not in entry:
                raise TraceError(f"line {number} has no {name}")
        trace.append(entry)
    return trace


def simulate(trace: Sequence[Mapping[str, Any]], config: SchedulerConfig, cost: CostModel) -> Outcome:
    """Runs the trace, one step after the other. Sampled tokens are random and never stop a request."""
    now = 0.0
    scheduler = Scheduler(config, clock=lambda: now)
    link = _Link(scheduler, cost.us_per_page / 1e6)
    tokens = np.random.default_rng(0)
    outcome = Outcome(num_requests=len(trace))
    arrivals = sorted(trace, key=lambda entry: entry["arrival_s"])
    pending = ((str(index), entry) for index, entry in enumerate(arrivals))
    upcoming = next(pending, None)
    while upcoming is not None or scheduler.has_unfinished_requests:
        while upcoming is not None and upcoming[1]["arrival_s"] <= now:
            try:
                scheduler.add_request(_request(*upcoming))
                outcome.tenants[upcoming[0]] = upcoming[1].get("tenant", "")
            except (RequestRefusedError, SchedulerBusyError):
                outcome.num_refused += 1
            upcoming = next(pending, None)
        outcome.num_timeouts += len(scheduler.expire())
        link.finish(now)
        plan = scheduler.schedule()
        link.begin(scheduler.take_page_moves(), now)
        if plan is None:
            waits = [now + scheduler.wait_s] if scheduler.wait_s else []
            waits += [upcoming[1]["arrival_s"]] if upcoming is not None else []
            waits += [link.next_done_at] if link.next_done_at is not None else []
            if not waits:
                break
            now = max(now, min(waits))
            continue
        now += cost.seconds(plan)
        sampled = SampledTokens.one_each(tokens.integers(0, _VOCABULARY, plan.num_seqs, np.int32))
        output = scheduler.update(plan, sampled)
        outcome.num_output_tokens += len(output.token_ids)
        for request in output.requests:
            outcome.ttft_s.setdefault(request.request_id, now - request.arrival_time)
        outcome.num_finished += len(output.finished)
        for request in output.finished:
            if request.num_output_tokens > 1:
                first_s = request.arrival_time + outcome.ttft_s[request.request_id]
                outcome.tpot_s[request.request_id] = (now - first_s) / (request.num_output_tokens - 1)
    outcome.seconds, outcome.stats = now, scheduler.stats()
    return outcome


def _request(name: str, entry: Mapping[str, Any]) -> Request:
    num_tokens = entry["prompt_tokens"]
    prefix = entry.get("prefix", name)
    num_shared = min(entry.get("prefix_tokens", num_tokens), num_tokens) if "prefix" in entry else 0
    shared = np.random.default_rng(zlib.crc32(prefix.encode())).integers(0, _VOCABULARY, num_shared)
    own = np.random.default_rng([1, int(name)]).integers(0, _VOCABULARY, num_tokens - num_shared)
    return Request(
        name,
        np.concatenate((shared, own)).tolist(),
        max_tokens=entry["output_tokens"],
        arrival_time=entry["arrival_s"],
        options=RequestOptions(**{name: entry[name] for name in ("tenant", "priority", "timeout_s") if name in entry}),
    )


def example_trace(num_requests: int = 400) -> Iterator[dict[str, Any]]:
    """Two tenants: one that sends everything at the start, and one that sends now and then, with a system prompt."""
    rng = np.random.default_rng(0)
    for index in range(num_requests):
        is_flood = index % 2 == 0
        yield {
            "arrival_s": 0.0 if is_flood else round(float(rng.uniform(0, 30)), 3),
            "prompt_tokens": int(rng.integers(200, 2000)) if is_flood else 1000 + int(rng.integers(20, 200)),
            "output_tokens": int(rng.integers(50, 300)),
            "tenant": "batch" if is_flood else "chat",
            **({} if is_flood else {"prefix": "system prompt", "prefix_tokens": 1000}),
        }


def report(outcomes: Mapping[str, Outcome], ttft_ms: float, tpot_ms: float) -> str:
    """A table with a column for each outcome."""

    def percentiles(values: Iterable[float]) -> str:
        found = list(values)
        return " ".join(f"{1e3 * value:,.0f}" for value in np.percentile(found, (50, 90, 99))) if found else "-"

    rows: dict[str, list[str]] = {}
    goodput = f"goodput (TTFT ≤ {ttft_ms:g}, TPOT ≤ {tpot_ms:g}), 1/s"
    names = sorted({tenant for outcome in outcomes.values() for tenant in outcome.tenants.values()})
    for outcome in outcomes.values():
        stats = outcome.stats
        assert stats is not None
        queried = stats.num_prefix_query_tokens
        cells = {
            "seconds": f"{outcome.seconds:,.1f}",
            "requests finished": f"{outcome.num_finished:,} of {outcome.num_requests:,}",
            "refused, timed out": f"{outcome.num_refused:,}, {outcome.num_timeouts:,}",
            "output tokens/s": f"{outcome.num_output_tokens / max(outcome.seconds, 1e-9):,.0f}",
            "TTFT p50 p90 p99, ms": percentiles(outcome.ttft_s.values()),
        }
        if len(names) > 1:
            for tenant in names:
                own = [ttft for name, ttft in outcome.ttft_s.items() if outcome.tenants[name] == tenant]
                cells[f"  of tenant {tenant or '(none)'}"] = percentiles(own)
        cells |= {
            "TPOT p50 p90 p99, ms": percentiles(outcome.tpot_s.values()),
            goodput: f"{outcome.goodput(ttft_ms / 1e3, tpot_ms / 1e3):.2f}",
            "preemptions": f"{stats.num_preemptions:,}",
            "recomputed tokens": f"{stats.num_recomputed_tokens:,}",
            "pages saved, loaded": f"{stats.num_saved_pages:,}, {stats.num_loaded_pages:,}",
            "stalls, their seconds": f"{stats.num_stalls:,}, {stats.stall_s:.1f}",
            "prefix hits, of prompt tokens": f"{stats.num_prefix_hit_tokens / queried:.0%}" if queried else "-",
            "budget used": f"{stats.all_steps.budget_use:.0%}",
        }
        for label, cell in cells.items():
            rows.setdefault(label, []).append(cell)
    width = max(map(len, rows)) + 2
    lines = [" " * width + "".join(f"{name:>22}" for name in outcomes)]
    lines += [f"{label:{width}}" + "".join(f"{cell:>22}" for cell in cells) for label, cells in rows.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", help="a file of JSON lines; - is stdin")
    parser.add_argument("--example", action="store_true", help="print a trace to begin with")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["priority"], help="one column each")
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192, "page_size": 64}
    for name, default in (sizes | {"num_pages": 4096, "num_host_pages": 0, "prefix_window": 1}).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"({default})")
    for name in ("tpot_target_ms", "ttft_target_ms"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, help="(none)")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--return-by", dest="kv_return_by", choices=RETURNS, default="auto", help="(auto)")
    for cost in ("fixed_ms", "us_per_token", "ns_per_kv_token", "ns_per_pair", "us_per_page"):
        default_cost = getattr(CostModel(), cost)
        parser.add_argument("--" + cost.replace("_", "-"), type=float, default=default_cost, help=f"({default_cost})")
    parser.add_argument("--good-ttft-ms", type=float, default=2000.0, help="for goodput (2000)")
    parser.add_argument("--good-tpot-ms", type=float, default=100.0, help="for goodput (100)")
    args = parser.parse_args(argv)
    if args.example:
        print(*map(json.dumps, example_trace()), sep="\n")
        return 0
    if args.trace is None:
        parser.error("no trace: name a file, or see --example")
    try:
        with open(0 if args.trace == "-" else args.trace, encoding="utf-8-sig", newline="\n") as file:
            trace = read_trace(file)
        names = (*sizes, "num_pages", "num_host_pages", "kv_return_by", "prefix_window")
        settings = {name: getattr(args, name) for name in (*names, "tpot_target_ms", "ttft_target_ms")}
        cost_model = CostModel(
            fixed_ms=args.fixed_ms,
            us_per_token=args.us_per_token,
            ns_per_kv_token=args.ns_per_kv_token,
            ns_per_pair=args.ns_per_pair,
            us_per_page=args.us_per_page,
        )
        configs = {
            policy: SchedulerConfig(
                scheduling_policy=policy, enable_prefix_caching=not args.no_prefix_caching, **settings
            )
            for policy in args.policy
        }
    except (OSError, ValueError) as error:
        parser.error(str(error))
    outcomes = {policy: simulate(trace, config, cost_model) for policy, config in configs.items()}
    print(report(outcomes, args.good_ttft_ms, args.good_tpot_ms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
