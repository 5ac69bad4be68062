"""What the prefix cache saves: many questions behind one long system prompt, with the cache and without it.

    python benchmarks/shared_prefix.py

Two engines in this process take turns; each round has a system prompt and questions of its own, so that nothing of an
earlier one is found. All questions arrive at once. Counted is everything from then to the last answer.
"""

import argparse
from statistics import median
from time import perf_counter

import numpy as np

from jaxllm import LLM, SamplingParams


def ask(llm: LLM, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Seconds until all questions are answered, and the part of their tokens that was found in the cache."""
    rng = np.random.default_rng(seed)
    vocab_size = llm.engine.vocab_size
    lowest = vocab_size // 32  # below, vocabularies keep special tokens
    system = rng.integers(lowest, vocab_size, args.system).tolist()
    prompts = [
        {"prompt_token_ids": system + rng.integers(lowest, vocab_size, args.question).tolist()}
        for _ in range(args.questions)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.answer, ignore_eos=True)
    before, start = llm.engine.scheduler.stats(), perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds, after = perf_counter() - start, llm.engine.scheduler.stats()
    num_hits = after.num_prefix_hit_tokens - before.num_prefix_hit_tokens
    return seconds, num_hits / sum(len(prompt["prompt_token_ids"]) for prompt in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a demo model, folder or .gguf file (smollm2-135m)")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt (1000)")
    parser.add_argument("--questions", type=int, default=32, help="(32)")
    parser.add_argument("--question", type=int, default=32, help="tokens of each question (32)")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer (16)")
    parser.add_argument("--rounds", type=int, default=3, help="of each engine (3)")
    args = parser.parse_args()

    max_model_len = args.system + args.question + args.answer
    engines = {
        name: LLM(args.model, max_model_len=max_model_len, max_num_seqs=32, enable_prefix_caching=is_enabled)
        for name, is_enabled in [("without", False), ("with", True)]
    }
    for llm in engines.values():
        llm.engine.runner.wait_until_compiled()
        ask(llm, argparse.Namespace(**{**vars(args), "questions": 2}), seed=0)
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for seed in range(1, args.rounds + 1):
        for name, llm in engines.items():
            rounds[name].append(ask(llm, args, seed))

    print(
        f"{args.questions} questions of {args.question} tokens behind a system prompt of {args.system:,}, "
        f"answers of {args.answer}"
    )
    print(f"{'prefix cache':14}{'best, s':>9}{'median, s':>11}{'hit rate':>10}")
    for name, its_rounds in rounds.items():
        seconds = [each for each, _ in its_rounds]
        print(f"{name:14}{min(seconds):9.2f}{median(seconds):11.2f}{its_rounds[0][1]:10.1%}")
    ratios = [off / on for (off, _), (on, _) in zip(rounds["without"], rounds["with"], strict=True)]
    print(f"faster by, in each round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
