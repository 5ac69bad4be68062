"""The work that every system is given, and the lines it prints about it.

Each system runs in a process, and each peer in an environment, of its own: this file needs the standard library only.
A script hands `measure` a function that loads its engine; everything that is timed is timed here, so that all are
timed alike. One JSON object a line on standard output, `{"measurement": NAME, ...}`; times are wall-clock seconds.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROMPT_LEN = 128
OUTPUT_LEN = 128
PREFILL_LEN = 512
PREFILL_BATCH = 8
SAMPLE_LEN = 16
MAX_MODEL_LEN = 1024

TokenIds = list[int]

Generate = Callable[[Sequence[TokenIds], int], list[TokenIds]]
"""(prompts, max_tokens) -> max_tokens greedily chosen ids for each prompt, all prompts at once; end tokens ignored."""


def main(load: Callable[[argparse.Namespace], Generate], version: str) -> None:
    """Measures the engine that `load` makes, as the command line asks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="what this system loads: a GGUF file, a folder or a name")
    parser.add_argument("--started-at", type=float, required=True, help="time.time() when this process was started")
    parser.add_argument("--sample", type=json.loads, default=[1] * 16, help="token ids of a prompt in plain language")
    parser.add_argument("--concurrency", type=json.loads, default=[1, 8, 32], help="numbers of requests at once")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--startup-only", action="store_true", help="stop after the first token")
    args = parser.parse_args()

    generate = load(args)
    _checked(generate, random_prompts("startup", 1, PROMPT_LEN), 1)
    _report("startup", seconds=time.time() - args.started_at, version=version)
    if not args.startup_only:
        _report("sample", token_ids=_checked(generate, [args.sample], SAMPLE_LEN)[0])
        _measure_throughput(generate, args.concurrency, args.repeats)
    _report("memory", peak_bytes=peak_memory_bytes())


def _measure_throughput(generate: Generate, concurrency: Sequence[int], repeats: int) -> None:
    """Times prefill and whole requests; each repeat has other prompts, so no cache of prefixes can answer."""
    jobs = [(f"prefill_{n}", n, PREFILL_LEN, 1) for n in (1, PREFILL_BATCH)]
    jobs += [(f"output_{n}", n, PROMPT_LEN, OUTPUT_LEN) for n in concurrency]
    for name, num_prompts, prompt_len, output_len in jobs:
        _checked(generate, random_prompts(f"warm-up {name}", num_prompts, prompt_len), min(output_len, 8))
        for repeat in range(repeats):
            prompts = random_prompts(f"{name} {repeat}", num_prompts, prompt_len)
            start = time.perf_counter()
            _checked(generate, prompts, output_len)
            seconds = time.perf_counter() - start
            num_tokens = num_prompts * (prompt_len if output_len == 1 else output_len)
            _report(name, seconds=seconds, tokens_per_s=num_tokens / seconds)


def random_prompts(key: str, num_prompts: int, prompt_len: int) -> list[TokenIds]:
    """Token ids that depend on `key` only; the low ids, where vocabularies keep special tokens, are left out."""
    generator = random.Random(key)
    return [[generator.randrange(1_000, 30_000) for _ in range(prompt_len)] for _ in range(num_prompts)]


def peak_memory_bytes() -> int:
    """Sum of the peak resident sizes of this process and its descendants (Linux); shared pages count in each."""
    return sum(_status_kib(pid, "VmHWM") * 1024 for pid in (os.getpid(), *_descendants(os.getpid())))


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _status_kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def _checked(generate: Generate, prompts: list[TokenIds], max_tokens: int) -> list[TokenIds]:
    outputs = generate(prompts, max_tokens)
    lengths = [len(output) for output in outputs]
    if lengths != [max_tokens] * len(prompts):
        raise SystemExit(f"{len(prompts)} prompts asked for {max_tokens} tokens each and got {lengths}")
    return outputs


def _report(measurement: str, **figures: object) -> None:
    print(json.dumps({"measurement": measurement, **figures}), flush=True)
