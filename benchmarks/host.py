"""What a step costs the host: schedule, build the batch, launch a stub, update, one step ahead of the device.

    python benchmarks/host.py --rows 8 64 256

`decode` is a steady state in which each running request gains a token; `churn` replaces each request that
finishes by a new one; `turnover` does so with requests of ten output tokens, so that a tenth of the rows changes in
each step. No prompt begins like another. No model runs: a step's result is a fixed array. Needs numpy only.
`slope` is what each further row costs, between this number of rows and the one before.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from itertools import count
from time import perf_counter

import numpy as np

from jaxllm.scheduler import Request, Scheduler, SchedulerConfig, StepBatch, declare_buckets, pick

PHASES = ("schedule", "build", "launch", "update")


def decode_load(num_rows: int, max_model_len: int, rng: np.random.Generator) -> Iterator[Request]:
    """As many requests as rows, which outlast the measurement. Lengths differ, so pages fill in turn."""
    for index in range(num_rows):
        prompt = rng.integers(0, 32_000, 64 + index % 64)
        yield Request(f"r{index}", prompt.tolist(), max_tokens=max_model_len, stop_token_ids=(2,))


def churn_load(num_rows: int, max_model_len: int, rng: np.random.Generator) -> Iterator[Request]:
    """Requests without end, of 16 to 127 tokens in and out."""
    del num_rows, max_model_len
    for index in count():
        prompt = rng.integers(0, 32_000, rng.integers(16, 128))
        yield Request(f"r{index}", prompt.tolist(), max_tokens=int(rng.integers(16, 128)), stop_token_ids=(2,))


def turnover_load(num_rows: int, max_model_len: int, rng: np.random.Generator) -> Iterator[Request]:
    """Requests without end, of 16 to 127 tokens in and 10 out. The first ones differ, to end in different steps."""
    del max_model_len
    for index in count():
        prompt = rng.integers(0, 32_000, rng.integers(16, 128))
        max_tokens = 10 if index >= num_rows else 1 + index % 10
        yield Request(f"r{index}", prompt.tolist(), max_tokens=max_tokens, stop_token_ids=(2,))


LOADS = {"decode": decode_load, "churn": churn_load, "turnover": turnover_load}


def measure(load: str, num_rows: int, args: argparse.Namespace) -> np.ndarray:
    """float[num_steps, 4]: seconds of each phase in each measured step."""
    config = SchedulerConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=2048 + 8 * num_rows,
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        num_pages=1 + num_rows * -(-args.max_model_len // args.page_size),
    )
    buckets = declare_buckets(config.max_num_batched_tokens, num_rows, 4)
    scheduler = Scheduler(config)
    requests = LOADS[load](num_rows, args.max_model_len, np.random.default_rng(0))
    results = np.random.default_rng(1).integers(3, 32_000, num_rows).astype(np.int32)
    in_flight: deque = deque()
    most = num_rows + num_rows // 8 + 1
    seconds = []
    while len(seconds) < args.warmup + args.steps:
        while scheduler.num_running + scheduler.num_waiting < most and (request := next(requests, None)):
            scheduler.add_request(request)
        marks = [perf_counter()]
        plan = scheduler.schedule()
        marks.append(perf_counter())
        assert plan is not None
        bucket = pick(buckets, plan.num_tokens, plan.num_seqs, plan.is_decode_only)
        StepBatch.build(plan, scheduler.table, bucket)
        marks.append(perf_counter())
        in_flight.append((plan, results[: plan.num_seqs]))
        marks.append(perf_counter())
        if len(in_flight) > 1:
            scheduler.update(*in_flight.popleft())
        marks.append(perf_counter())
        seconds.append(np.diff(marks))
    return np.array(seconds[args.warmup :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 1024], help="running (8 64 256 1024)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="what runs (all)")
    parser.add_argument("--steps", type=int, default=1000, help="measured steps (1000)")
    parser.add_argument("--warmup", type=int, default=200, help="steps before them (200)")
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens (4096)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens (64)")
    args = parser.parse_args()
    if args.warmup + args.steps + 128 > args.max_model_len:
        parser.error("--warmup + --steps + 128 exceeds --max-model-len: the requests of the decode load would end")

    print("microseconds per step; phases are medians")
    print(
        f"{'load':8}{'rows':>6}"
        + "".join(f"{phase:>10}" for phase in PHASES)
        + f"{'best':>10}{'median':>10}{'slope':>8}"
    )
    for load in args.loads:
        before = None
        for num_rows in args.rows:
            microseconds = 1e6 * measure(load, num_rows, args)
            total = microseconds.sum(axis=1)
            figures = [*np.median(microseconds, axis=0), total.min(), np.median(total)]
            slope = "" if before is None else f"{(figures[-1] - before[1]) / (num_rows - before[0]):8.3f}"
            print(f"{load:8}{num_rows:6}" + "".join(f"{figure:10.1f}" for figure in figures) + slope)
            before = num_rows, figures[-1]


if __name__ == "__main__":
    main()
