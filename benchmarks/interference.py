"""What a long prompt does to those who are being answered: 16 decodes, and a prompt of 4,000 tokens arrives.

    python benchmarks/interference.py

Two engines in this process, one with a target for TPOT and one without, take turns. In each turn the prompt comes among
the decodes, and counted are the times between their tokens (ITL) from its arrival to its first token, which is its
TTFT; then the same decodes write the same tokens again, alone. The target follows from what decodes took alone, if none
is given.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.scheduler.step_plan import StepOutput

LONG = "long"


@dataclass
class Turn:
    """Milliseconds between tokens of the decodes, without and with the prompt; seconds to the prompt's first token."""

    without_ms: np.ndarray
    with_ms: np.ndarray
    ttft_s: float
    num_steps: int

    @property
    def ratio(self) -> float:
        return float(np.percentile(self.with_ms, 99) / np.percentile(self.without_ms, 99))


class Clock:
    """Notes when each request of an engine gets its tokens."""

    def __init__(self, llm: LLM):
        self.times: dict[str, list[float]] = defaultdict(list)
        scheduler = llm.engine.scheduler
        update = scheduler.update

        def timed_update(*args, **options) -> StepOutput:
            output = update(*args, **options)
            now = perf_counter()
            for request in output.requests:
                self.times[request.request_id].append(now)
            return output

        scheduler.update = timed_update

    def gaps_ms(self, start: float, end: float) -> np.ndarray:
        """Between the tokens of the decodes, where the later one came from `start` to `end`."""
        gaps = [
            later - earlier
            for request_id, times in self.times.items()
            if request_id != LONG
            for earlier, later in pairwise(times)
            if start <= later <= end
        ]
        return 1e3 * np.array(gaps)


def run_turn(llm: LLM, clock: Clock, args: argparse.Namespace, rng: np.random.Generator) -> Turn:
    seed = rng.integers(1 << 30)
    start_decodes(llm, clock, args, seed)
    arrival, num_steps = perf_counter(), 0
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.engine.add_request(LONG, random_tokens(rng, llm, args.prompt), params)
    while LONG not in clock.times:
        llm.engine.step()
        num_steps += 1
    first_token = clock.times[LONG][0]
    with_ms = clock.gaps_ms(arrival, first_token)
    end(llm)
    return Turn(run_alone(llm, clock, args, seed, num_steps), with_ms, first_token - arrival, num_steps)


def run_alone(llm: LLM, clock: Clock, args: argparse.Namespace, seed: int, num_steps: int) -> np.ndarray:
    """Milliseconds between tokens of the decodes with nothing beside them, over the tokens of so many steps."""
    start_decodes(llm, clock, args, seed)
    start = perf_counter()
    for _ in range(max(num_steps, args.steps)):
        llm.engine.step()
    gaps_ms = clock.gaps_ms(start, perf_counter())
    end(llm)
    return gaps_ms


def start_decodes(llm: LLM, clock: Clock, args: argparse.Namespace, seed: int) -> None:
    """Until each has some tokens. Their prompts are read first, and found in the prefix cache then: else a target would
    slow down this part too."""
    rng = np.random.default_rng(seed)
    prompts = [random_tokens(rng, llm, args.decode_prompt + index) for index in range(args.decodes)]
    for max_tokens in (1, None):
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        clock.times.clear()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            llm.engine.add_request(str(index), prompt, params)
    while len(clock.times) < args.decodes or min(map(len, clock.times.values())) < 8:
        llm.engine.step()


def end(llm: LLM) -> None:
    llm.engine.abort_all()
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def random_tokens(rng: np.random.Generator, llm: LLM, number: int) -> list[int]:
    """Without the low ids, where vocabularies keep special tokens."""
    return rng.integers(llm.engine.vocab_size // 32, llm.engine.vocab_size, number).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a demo model, folder or .gguf file (smollm2-135m)")
    parser.add_argument("--decodes", type=int, default=16, help="requests that are being answered (16)")
    parser.add_argument("--decode-prompt", type=int, default=200, help="tokens of their prompts (200)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt (4000)")
    parser.add_argument("--steps", type=int, default=100, help="of the decodes alone, at least (100)")
    parser.add_argument("--turns", type=int, default=3, help="of each engine (3)")
    parser.add_argument("--tpot-target-ms", type=float, help="(1.25 times the median ITL of the decodes alone)")
    parser.add_argument("--max-model-len", type=int, default=6144, help="tokens (6144)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="(32)")
    args = parser.parse_args()

    options = dict(max_model_len=args.max_model_len, max_num_seqs=args.max_num_seqs)
    rng = np.random.default_rng(0)
    off = start(args.model, **options)
    alone_ms = run_alone(*off, args, 0, args.steps)
    target_ms = args.tpot_target_ms or round(1.25 * float(np.median(alone_ms)), 1)
    engines = {"no target": off, f"{target_ms} ms": start(args.model, tpot_target_ms=target_ms, **options)}
    turns = {name: [] for name in engines}
    for _ in range(args.turns):
        for name, engine in engines.items():
            turns[name].append(run_turn(*engine, args, rng))
    print(
        f"{args.decodes} decodes of {args.decode_prompt:,} tokens and a prompt of {args.prompt:,}; "
        "milliseconds between tokens of the decodes"
    )
    print(
        f"{'TPOT target':14}{'alone: p50':>12}{'p99':>8}{'with it: p50':>14}{'p99':>8}{'max':>8}"
        f"{'p99 ratio':>11}{'best':>7}{'TTFT, s':>9}{'steps':>7}"
    )
    for name, its_turns in turns.items():
        percentiles = [
            median(float(np.percentile(getattr(turn, field), percent)) for turn in its_turns)
            for field, percent in [
                ("without_ms", 50),
                ("without_ms", 99),
                ("with_ms", 50),
                ("with_ms", 99),
                ("with_ms", 100),
            ]
        ]
        ratios = [turn.ratio for turn in its_turns]
        a, b, c, d, e = percentiles
        print(
            f"{name:14}{a:12.1f}{b:8.1f}{c:14.1f}{d:8.1f}{e:8.1f}{median(ratios):11.2f}{min(ratios):7.2f}"
            f"{median(turn.ttft_s for turn in its_turns):9.2f}{median(turn.num_steps for turn in its_turns):7.0f}"
        )


def start(model: str, **options) -> tuple[LLM, Clock]:
    llm = LLM(model, **options)
    llm.engine.runner.wait_until_compiled()
    return llm, Clock(llm)


if __name__ == "__main__":
    main()
