"""Output tokens/s over HTTP beside those of `LLM.generate`, with the same prompts, in one run.

    python benchmarks/server_throughput.py --model smollm2-135m

Both get the same token ids, choose greedily and ignore end tokens. The server is `jaxllm serve` with its defaults; its
client (byte_counter.py) keeps `--concurrency` requests running, each as a stream, and counts bytes. LLM.generate gets
all prompts at once and runs as many at a time. They take turns, each in a process of its own; the median ratio of the
turns counts, as two neighbours share what else the machine does.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median

import uvloop
from byte_counter import closed_loop, request_bytes
from server_process import server

BAR = 0.95
MAX_MODEL_LEN = 1024


def prompts(turn: int, number: int, num_tokens: int) -> list[list[int]]:
    """Random token ids: none twice, so that no cache of prefixes can answer."""
    import random

    generator = random.Random(f"{turn} {number} {num_tokens}")
    return [[generator.randrange(1_000, 30_000) for _ in range(num_tokens)] for _ in range(number)]


def engine_options(args: argparse.Namespace) -> dict[str, int]:
    return {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": args.concurrency}


def generate(args: argparse.Namespace) -> None:
    """The process of LLM.generate: prints seconds, one number a line."""
    from jaxllm import LLM, SamplingParams

    llm = LLM(args.model, **engine_options(args))
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    llm.engine.runner.wait_until_compiled()
    for turn in (0, args.turn):
        number = args.concurrency if turn == 0 else args.num_prompts
        ids = [{"prompt_token_ids": ids} for ids in prompts(turn, number, args.input_len)]
        start = time.perf_counter()
        llm.generate(ids, params if turn else SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
        if turn:
            print(time.perf_counter() - start, flush=True)


def measure_generate(args: argparse.Namespace, turn: int) -> float:
    """Seconds."""
    command = [sys.executable, __file__, *sys.argv[1:], "--turn", str(turn)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ).stdout)


def measure_server(args: argparse.Namespace, turn: int) -> float:
    """Seconds."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in engine_options(args).items()]
    with server([args.model, *options]) as process:

        def bodies(turn: int, number: int, num_tokens: int) -> Iterator[bytes]:
            for ids in prompts(turn, number, args.input_len):
                body = {"model": args.model, "prompt": ids, "max_tokens": num_tokens, "temperature": 0}
                body |= {"stream": True, "ignore_eos": True}
                yield request_bytes(process.url, "/v1/completions", json.dumps(body).encode())

        def run(requests: Sequence[bytes]) -> float:
            return uvloop.run(closed_loop(process.url, iter(requests), args.concurrency, streams=True)).seconds

        run(list(bodies(0, args.concurrency, 8)))
        process.wait_until_quiet()
        return run(list(bodies(turn, args.num_prompts, args.output_len)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="(smollm2-135m)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once (32)")
    parser.add_argument("--num-prompts", type=int, default=96, help="(96)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens (128)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens (128)")
    parser.add_argument("--turns", type=int, default=3, help="of each (3)")
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        generate(args)
        return
    num_tokens = args.num_prompts * args.output_len
    ratios = []
    for turn in range(1, args.turns + 1):
        inside, outside = (num_tokens / measure(args, turn) for measure in (measure_generate, measure_server))
        ratios.append(outside / inside)
        figures = f"LLM.generate {inside:8,.1f}   HTTP {outside:8,.1f} output tokens/s"
        print(f"turn {turn}   {figures}   ratio {ratios[-1]:.3f}", flush=True)
    print(f"median HTTP / LLM.generate: {median(ratios):.3f} (bar: {BAR})")


if __name__ == "__main__":
    main()
