"""The work that every system is given, and the lines it prints about it.

Each system runs in a process, and each peer in an environment, of its own, so this file needs the standard library
only. A script hands `main` a function that loads its engine; everything that is timed is timed here, so that all are
timed alike. One JSON object a line on standard output, `{"measurement": NAME, ...}`; times are wall-clock seconds.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPT_LEN = 128
OUTPUT_LEN = 128
PREFILL_LEN = 512
PREFILL_BATCHES = (1, 8)
WARM_UP_LEN = 8
SAMPLE_LEN = 16
MAX_MODEL_LEN = 1024

TokenIds = list[int]


@dataclass(frozen=True)
class Engine:
    """generate(prompts, max_tokens): greedily chosen ids, exactly max_tokens for each prompt, all prompts at once.

    settle() returns when the engine has nothing left to do in the background, such as compiling.
    """

    generate: Callable[[Sequence[TokenIds], int], list[TokenIds]]
    settle: Callable[[], None] = lambda: None


def main(load: Callable[[argparse.Namespace], Engine], version: str) -> None:
    """Measures the engine that `load` makes, as the command line asks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="what this system loads: a GGUF file, a folder or a name")
    parser.add_argument("--started-at", type=float, required=True, help="time.time() at the start of this process")
    parser.add_argument("--sample", type=json.loads, default=[1] * 16, help="token ids of a prompt in plain language")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="numbers of requests at once")
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement")
    args = parser.parse_args()

    engine = load(args)
    _generate(engine, random_prompts("start-up", 1, PROMPT_LEN), 1)
    _report("startup", seconds=time.time() - args.started_at, version=version)
    engine.settle()
    _report("sample", token_ids=_generate(engine, [args.sample], SAMPLE_LEN)[0])
    for num_prompts in PREFILL_BATCHES:
        for seconds in _timed(engine, num_prompts, PREFILL_LEN, 1, args.repeats):
            _report(f"prefill_{num_prompts}", tokens_per_s=num_prompts * PREFILL_LEN / seconds)
    for num_prompts in args.concurrency:
        for seconds in _timed(engine, num_prompts, PROMPT_LEN, OUTPUT_LEN, args.repeats):
            _report(f"output_{num_prompts}", tokens_per_s=num_prompts * OUTPUT_LEN / seconds)
    _report("memory", peak_bytes=peak_memory_bytes())


def random_prompts(key: str, num_prompts: int, prompt_len: int) -> list[TokenIds]:
    """Token ids that depend on the arguments only, without the low ids, where vocabularies keep special tokens."""
    generator = random.Random(f"{key} {num_prompts} {prompt_len}")
    return [[generator.randrange(1_000, 30_000) for _ in range(prompt_len)] for _ in range(num_prompts)]


def peak_memory_bytes() -> int:
    """Sum of the peak resident sizes of this process and its descendants (Linux); shared pages count in each."""
    return sum(_peak_kib(pid) * 1024 for pid in (os.getpid(), *_descendants(os.getpid())))


def _timed(engine: Engine, num_prompts: int, prompt_len: int, max_tokens: int, repeats: int) -> Iterator[float]:
    """Seconds of each repeat. Each has prompts of its own, so that no cache of prefixes can answer."""
    _generate(engine, random_prompts("warm-up", num_prompts, prompt_len), min(max_tokens, WARM_UP_LEN))
    for repeat in range(repeats):
        prompts = random_prompts(f"repeat {repeat}", num_prompts, prompt_len)
        start = time.perf_counter()
        _generate(engine, prompts, max_tokens)
        yield time.perf_counter() - start


def _generate(engine: Engine, prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
    outputs = engine.generate(prompts, max_tokens)
    lengths = [len(output) for output in outputs]
    if lengths != [max_tokens] * len(prompts):
        raise SystemExit(f"{len(prompts)} prompts asked for {max_tokens} tokens each and got {lengths}")
    return outputs


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _peak_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _report(measurement: str, **figures: object) -> None:
    print(json.dumps({"measurement": measurement, **figures}), flush=True)
