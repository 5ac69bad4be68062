"""What a benchmark asks for: the lengths of each request, when it is due, and what it begins with."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxllm import ConfigError
from jaxllm.scheduler.simulate import TraceError, read_trace

SHAREGPT_LEVELS = (*(level / 100 for level in range(0, 100, 5)), 0.99, 1.0)
SHAREGPT_PROMPT_LENS = (
    4, 7, 8, 10, 12, 14, 16, 19, 21, 25, 30, 36, 45, 58, 75, 100, 139, 213, 342, 578, 917, 1024,
)  # fmt: skip
SHAREGPT_OUTPUT_LENS = (
    4, 25, 48, 79, 104, 130, 160, 189, 215, 242, 266, 289, 316, 343, 374, 409, 457, 519, 612, 758, 920, 1742,
)  # fmt: skip
"""Quantiles (0, 5, … 95, 99, 100%) of first questions and first answers in ShareGPT V3 (unfiltered, cleaned), in tokens
of SmolLM2's tokenizer: 9,813 conversations of the first 17,671 in the file, those that begin with a question and its
answer, kept as vLLM's benchmark does (both at least 4 tokens, prompts up to 1,024, both together up to 2,048). Means
110 and 300. The two are drawn apart: their rank correlation is 0.13."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """A request to be made.

    due_s: seconds after the start; None: when there is room.
    prefix: requests with the same one begin with the same `prefix_len` tokens.
    """

    prompt_len: int
    output_len: int
    due_s: float | None = None
    prefix: str = ""
    prefix_len: int = 0
    tenant: str = ""
    priority: int | None = None
    timeout_s: float | None = None


def random_requests(
    num_requests: int, input_len: int, output_len: int, spread: float, rng: np.random.Generator
) -> list[BenchRequest]:
    """Lengths are uniform within ± spread (0 … 1) of what is given."""
    prompt_lens = _around(input_len, spread, num_requests, rng)
    output_lens = _around(output_len, spread, num_requests, rng)
    return [BenchRequest(prompt_len=p, output_len=o) for p, o in zip(prompt_lens, output_lens, strict=True)]


def sharegpt_requests(num_requests: int, rng: np.random.Generator) -> list[BenchRequest]:
    """Lengths as of questions and answers in ShareGPT."""
    prompt_lens = np.interp(rng.random(num_requests), SHAREGPT_LEVELS, SHAREGPT_PROMPT_LENS)
    output_lens = np.interp(rng.random(num_requests), SHAREGPT_LEVELS, SHAREGPT_OUTPUT_LENS)
    return [
        BenchRequest(prompt_len=round(p), output_len=round(o)) for p, o in zip(prompt_lens, output_lens, strict=True)
    ]


def shared_prefix_requests(
    num_requests: int, num_prefixes: int, prefix_len: int, input_len: int, output_len: int, rng: np.random.Generator
) -> list[BenchRequest]:
    """Each begins with one of `num_prefixes` prefixes, drawn evenly, and goes on with `input_len` tokens of its own."""
    prefixes = rng.integers(0, num_prefixes, num_requests)
    one = BenchRequest(prompt_len=prefix_len + input_len, output_len=output_len, prefix_len=prefix_len)
    return [replace(one, prefix=f"prefix {prefix}") for prefix in prefixes]


def trace_requests(path: str | Path, speed: float) -> list[BenchRequest]:
    """A recorded trace, in the form of `python -m jaxllm.scheduler.simulate`, `speed` times as fast.

    Raises ConfigError: it cannot be read; names the line.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            entries = read_trace(file)
    except (OSError, UnicodeDecodeError, TraceError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    if not entries:
        raise ConfigError(f"the trace {path} has no requests")
    start = min(entry["arrival_s"] for entry in entries)
    requests = [
        BenchRequest(
            prompt_len=entry["prompt_tokens"],
            output_len=entry["output_tokens"],
            due_s=(entry["arrival_s"] - start) / speed,
            prefix=entry.get("prefix", ""),
            prefix_len=min(entry.get("prefix_tokens", entry["prompt_tokens"]), entry["prompt_tokens"])
            if "prefix" in entry
            else 0,
            tenant=entry.get("tenant", ""),
            priority=entry.get("priority"),
            timeout_s=entry.get("timeout_s"),
        )
        for entry in entries
    ]
    return sorted(requests, key=lambda request: request.due_s or 0.0)


def arriving(
    requests: Iterable[BenchRequest], rate: float, burstiness: float, rng: np.random.Generator
) -> list[BenchRequest]:
    """The same requests, due at random times, `rate` a second on average; the first at once.

    burstiness: the gaps' shape, 1 / (coefficient of variation)²: 1 is a Poisson process, less comes in bursts, more
      is more even.
    """
    requests = list(requests)
    if math.isinf(rate):
        return [replace(request, due_s=0.0) for request in requests]
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), len(requests))
    gaps[:1] = 0.0
    return [replace(request, due_s=float(due_s)) for request, due_s in zip(requests, np.cumsum(gaps), strict=True)]


def tenants_of(requests: Sequence[BenchRequest]) -> list[str]:
    return sorted({request.tenant for request in requests})


def _around(length: int, spread: float, count: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, math.floor(length * (1 - spread))), math.ceil(length * (1 + spread))
    return rng.integers(low, high + 1, count).tolist()
