"""Conversations whose keys and values do not fit on the device: copied to the host and back, or computed again.

    python benchmarks/tiers.py

Users take turns: each turn of a conversation asks for its history, which others have meanwhile driven out of the KV
cache. The device has pages for a part of what all conversations come to have (`--part`, a quarter), the host for all of
it, or nothing. Two engines in this process, one with pages on the host and one without, take turns on the same
conversations; new ones in each round. Counted is everything from the first prompt to the last answer.
"""

import argparse
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.scheduler import SchedulerStats

PAGE_SIZE = 64


@dataclass(frozen=True)
class Round:
    """One round of an engine, and what the scheduler counted before and after it."""

    seconds: float
    num_output_tokens: int
    page_bytes: int
    before: SchedulerStats
    after: SchedulerStats

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    def counted(self, name: str) -> float:
        return getattr(self.after, name) - getattr(self.before, name)

    @property
    def num_prefill_tokens(self) -> int:
        return self.after.all_steps.num_prefill_tokens - self.before.all_steps.num_prefill_tokens

    @property
    def hit_rate(self) -> float:
        return self.counted("num_prefix_hit_tokens") / self.counted("num_prefix_query_tokens")

    def gigabytes(self, name: str) -> float:
        return self.counted(name) * self.page_bytes / 1e9


def converse(llm: LLM, args: argparse.Namespace, seed: int) -> Round:
    """All conversations from their first to their last turn."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    vocab_size = llm.engine.vocab_size
    lowest = vocab_size // 32  # below, vocabularies keep special tokens
    histories: list[list[int]] = [[] for _ in range(args.conversations)]
    before, start = llm.engine.scheduler.stats(), perf_counter()
    for turn in range(args.turns):
        for history in histories:
            history += rng.integers(lowest, vocab_size, args.question if turn else args.first).tolist()
        outputs = llm.generate([{"prompt_token_ids": history} for history in histories], params, use_tqdm=False)
        for history, output in zip(histories, outputs, strict=True):
            history += output.outputs[0].token_ids
    seconds = perf_counter() - start
    num_output_tokens = args.conversations * args.turns * args.answer
    return Round(seconds, num_output_tokens, llm.engine.info.page_bytes, before, llm.engine.scheduler.stats())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a demo model, folder or .gguf file (smollm2-135m)")
    parser.add_argument("--conversations", type=int, default=16, help="(16)")
    parser.add_argument("--turns", type=int, default=5, help="of each conversation (5)")
    parser.add_argument("--first", type=int, default=512, help="tokens of the first question (512)")
    parser.add_argument("--question", type=int, default=64, help="tokens of the others (64)")
    parser.add_argument("--answer", type=int, default=32, help="tokens (32)")
    parser.add_argument("--part", type=float, default=0.25, help="of all pages that fit on the device (0.25)")
    parser.add_argument("--return-by", default="auto", choices=["auto", "copy"], help="kv_return_by (auto)")
    parser.add_argument("--rounds", type=int, default=3, help="of each engine (3)")
    args = parser.parse_args()

    num_tokens = args.first + (args.turns - 1) * args.question + args.turns * args.answer
    num_pages = args.conversations * -(-num_tokens // PAGE_SIZE)
    num_device_pages = max(round(args.part * num_pages), -(-num_tokens // PAGE_SIZE)) + 1
    options = {"page_size": PAGE_SIZE, "num_pages": num_device_pages, "max_model_len": num_tokens}
    without = LLM(args.model, **options)
    page_bytes = without.engine.info.page_bytes
    host_kv_gb = num_pages * page_bytes / 1e9
    engines = {"none": without, "all": LLM(args.model, host_kv_gb=host_kv_gb, kv_return_by=args.return_by, **options)}
    for llm in engines.values():
        llm.engine.runner.wait_until_compiled()
        converse(llm, args, seed=0)

    rounds: dict[str, list[Round]] = {name: [] for name in engines}
    for seed in range(1, args.rounds + 1):
        for name, llm in engines.items():
            rounds[name].append(converse(llm, args, seed))
    print(
        f"{args.conversations} conversations of {args.turns} turns, {num_tokens:,} tokens each at their end: "
        f"{num_pages:,} pages of {page_bytes / 1e6:.2f} MB, of which {num_device_pages - 1:,} fit on the device"
    )
    print(
        f"{'on the host':12}{'best, s':>9}{'median, s':>11}{'output tokens/s':>17}{'computed':>10}{'hit rate':>10}"
        f"{'saved, GB':>11}{'loaded, GB':>12}{'stalls':>8}{'stall, s':>10}"
    )
    for name, its_rounds in rounds.items():
        best = min(its_rounds, key=lambda one: one.seconds)
        print(
            f"{name:12}{best.seconds:9.2f}{median(one.seconds for one in its_rounds):11.2f}{best.tokens_per_s:17.1f}"
            f"{best.num_prefill_tokens:10,}{best.hit_rate:10.1%}{best.gigabytes('num_saved_pages'):11.2f}"
            f"{best.gigabytes('num_loaded_pages'):12.2f}{best.counted('num_stalls'):8}{best.counted('stall_s'):10.2f}"
        )
    ratios = [off.seconds / on.seconds for off, on in zip(rounds["none"], rounds["all"], strict=True)]
    print(f"throughput with pages on the host, by without, in each round: {', '.join(f'{r:.2f}' for r in ratios)}")


if __name__ == "__main__":
    main()
