"""What a step costs the host: schedule, build the batch, launch a stub, update, one step ahead of the device.

    python benchmarks/host.py --rows 8 64 256

`decode` is a steady state in which each running request gains a token; `churn` replaces each request that
finishes by a new one; `turnover` does so with requests of ten output tokens, so that a tenth of the rows changes in
each step. No prompt begins like another. No model runs: a step's result is a fixed array. Needs numpy only.
`slope` is what each further row costs, between this number of rows and the one before.

Where vLLM is installed (benchmarks/peers/install.sh), its scheduler gets the same requests afterwards, in a Python of
its own: schedule and update, without what it does to build a batch. `of best` and `of median` are its figures by ours;
on a busy machine, the best are nearer to the truth.
"""

import argparse
import json
import subprocess
from collections import deque
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
from peers.host_load import LOADS, STOP_TOKEN_ID, max_num_batched_tokens, num_unfinished, sampled_token_ids

from jaxllm.scheduler import Request, SampledTokens, Scheduler, SchedulerConfig, StepBatch, declare_buckets, pick_bucket

HERE = Path(__file__).resolve().parent
PHASES = ("schedule", "build", "launch", "update")


def measure(load: str, num_rows: int, args: argparse.Namespace) -> np.ndarray:
    """float[num_steps, 4]: seconds of each phase in each measured step."""
    config = SchedulerConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=max_num_batched_tokens(num_rows),
        max_model_len=args.max_model_len,
        page_size=args.page_size,
        num_pages=1 + num_rows * -(-args.max_model_len // args.page_size),
    )
    buckets = declare_buckets(config.max_num_batched_tokens, num_rows, 4)
    scheduler = Scheduler(config)
    arrivals = LOADS[load](num_rows, args.max_model_len)
    results = np.array(sampled_token_ids(num_rows), np.int32)
    sampled = cache(lambda num_seqs: SampledTokens.one_each(results[:num_seqs]))
    in_flight: deque = deque()
    most = num_unfinished(num_rows)
    seconds, num_added = [], 0
    while len(seconds) < args.warmup + args.steps:
        while scheduler.num_running + scheduler.num_waiting < most and (arrival := next(arrivals, None)):
            prompt, max_tokens = arrival
            scheduler.add_request(
                Request(f"r{num_added}", prompt, max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN_ID,))
            )
            num_added += 1
        marks = [perf_counter()]
        plan = scheduler.schedule()
        marks.append(perf_counter())
        assert plan is not None
        bucket = pick_bucket(buckets, plan.num_tokens, plan.num_seqs, plan.max_q_len)
        StepBatch.build(plan, scheduler.table, bucket)
        marks.append(perf_counter())
        in_flight.append((plan, sampled(plan.num_seqs)))
        marks.append(perf_counter())
        if len(in_flight) > 1:
            scheduler.update(*in_flight.popleft())
        marks.append(perf_counter())
        seconds.append(np.diff(marks))
    return np.array(seconds[args.warmup :])


def measure_vllm(args: argparse.Namespace) -> list[dict]:
    """vLLM's figures, in microseconds; none, and a line that says why, where it cannot be run."""
    python = args.peers_dir / "vllm" / "bin" / "python"
    if not python.exists():
        print(f"vllm: not installed in {args.peers_dir}: left out")
        return []
    sizes = {"rows": args.rows, "loads": args.loads, "steps": [args.steps], "warmup": [args.warmup]}
    sizes |= {"max-model-len": [args.max_model_len], "page-size": [args.page_size]}
    command = [str(python), str(HERE / "peers" / "vllm_scheduler.py")]
    for name, values in sizes.items():
        command += [f"--{name}", *map(str, values)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"vllm: failed with status {result.returncode}: left out\n{result.stderr.strip()[-2000:]}")
        return []
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 1024], help="running (8 64 256 1024)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="what runs (all)")
    parser.add_argument("--steps", type=int, default=1000, help="measured steps (1000)")
    parser.add_argument("--warmup", type=int, default=200, help="steps before them (200)")
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens (4096)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens (64)")
    parser.add_argument("--peers-dir", type=Path, default=HERE.parent / ".venv-peers", help="where vLLM is")
    args = parser.parse_args()
    if args.warmup + args.steps + 128 > args.max_model_len:
        parser.error("--warmup + --steps + 128 exceeds --max-model-len: the requests of the decode load would end")

    print("microseconds per step; phases are medians")
    print(
        f"{'load':8}{'rows':>6}"
        + "".join(f"{phase:>10}" for phase in PHASES)
        + f"{'best':>10}{'median':>10}{'slope':>8}"
    )
    ours: dict[tuple[str, int], tuple[float, float]] = {}
    for load in args.loads:
        before = None
        for num_rows in args.rows:
            microseconds = 1e6 * measure(load, num_rows, args)
            total = microseconds.sum(axis=1)
            figures = [*np.median(microseconds, axis=0), total.min(), np.median(total)]
            slope = "" if before is None else f"{(figures[-1] - before[1]) / (num_rows - before[0]):8.3f}"
            print(f"{load:8}{num_rows:6}" + "".join(f"{figure:10.1f}" for figure in figures) + slope, flush=True)
            ours[load, num_rows] = figures[-2], figures[-1]
            before = num_rows, figures[-1]

    print()
    if of_vllm := measure_vllm(args):
        print(f"vLLM {of_vllm[0]['version']}")
        names = ("schedule", "update", "best", "median", "of best", "of median")
        print(f"{'load':8}{'rows':>6}" + "".join(f"{name:>10}" for name in names))
        for row in of_vllm:
            best, median = ours[row["load"], row["rows"]]
            figures = [row[name] for name in ("schedule", "update", "best", "median")]
            print(
                f"{row['load']:8}{row['rows']:6}"
                + "".join(f"{figure:10.1f}" for figure in figures)
                + f"{row['best'] / best:10.1f}{row['median'] / median:10.1f}"
            )


if __name__ == "__main__":
    main()
