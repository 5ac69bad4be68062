"""What the server costs, over an engine that costs nothing.

    python benchmarks/server_overhead.py

The engine (free_engine.py, in its own process) gives each request a token in each step; one HTTP worker; a client that
only counts bytes (byte_counter.py, this process); all on the same cores. Measured are

  free     streamed tokens/s when the engine makes them as fast as they are taken: tokens that wait go into one event
  paced    the same at a given rate; while tokens come in events of their own, the server has kept up with each
  short    short answers that are not streamed, a second
  added    at about 32 requests at once, Poisson arrivals, steps of 10 ms: the median times of a request over HTTP less
           those of the same requests, at the same times, with the engine, tokenizer and detokenizer in one process

CPU is what an event (or a short answer) costs the HTTP worker, the engine's process and the client, in microseconds:
figures that hold on a busy machine, too.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import numpy as np
import server_process
import uvloop
from byte_counter import Counts, closed_loop, open_loop, request_bytes
from free_engine import STEP_MS, FreeEngine
from server_process import ServerProcess
from systems import find_gguf

from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.text.output_processor import OutputProcessor
from jaxllm.loading.sources import open_checkpoint

BARS = {"free": 10_000, "short": 400, "added": 3.0}
TEXT = "The history of the city begins long before its walls were built, when traders met at the river's only ford."
LATENCY_STEP_MS, LATENCY_RATE, LATENCY_TOKENS = 10.0, 100.0, 32


def server(model: str, step_ms: float) -> AbstractContextManager[ServerProcess]:
    """A server whose engine takes so long for a step."""
    return server_process.server(
        ["--model", model, "--serve"], [__file__], {STEP_MS: str(step_ms), "JAX_PLATFORMS": "cpu"}
    )


def measure_streams(process: ServerProcess, model: str, num_requests: int, concurrency: int, num_tokens: int) -> str:
    body = {"model": model, "prompt": TEXT, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    request = request_bytes(process.url, "/v1/completions", json.dumps(body).encode())
    uvloop.run(closed_loop(process.url, iter([request] * concurrency), concurrency, streams=True))
    requests = itertools.repeat(request, num_requests)
    load = _Load(process, closed_loop(process.url, requests, concurrency, streams=True))
    counts, num_all = load.counts, num_requests * num_tokens
    num_events = counts.num_events - num_requests  # [DONE]
    return (
        f"{num_all / counts.seconds:>9,.0f} tokens/s  {num_all / num_events:6.2f} tokens in an event  "
        f"TTFT {1e3 * median(counts.first_s):6.1f} ms  {load.cpu(num_events)}"
    )


def measure_short(process: ServerProcess, model: str, path: str, num_requests: int, concurrency: int) -> str:
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    body = {"model": model, "max_tokens": 8, "ignore_eos": True} | prompt
    request = request_bytes(process.url, path, json.dumps(body).encode())
    uvloop.run(closed_loop(process.url, iter([request] * concurrency), concurrency, streams=False))
    requests = itertools.repeat(request, num_requests)
    load = _Load(process, closed_loop(process.url, requests, concurrency, streams=False))
    rate, median_ms = num_requests / load.counts.seconds, 1e3 * median(load.counts.whole_s)
    return f"{rate:>9,.0f} requests/s  median {median_ms:6.1f} ms  {load.cpu(num_requests)}"


def measure_added(model: str, num_requests: int) -> str:
    rng = np.random.default_rng(0)
    due_s = np.cumsum(rng.exponential(1 / LATENCY_RATE, num_requests)).tolist()
    with server(model, LATENCY_STEP_MS) as process:
        body = {"model": model, "prompt": TEXT, "max_tokens": LATENCY_TOKENS, "stream": True, "ignore_eos": True}
        request = request_bytes(process.url, "/v1/completions", json.dumps(body).encode())
        uvloop.run(closed_loop(process.url, iter([request] * 32), 32, streams=True))
        load = _Load(process, open_loop(process.url, [request] * num_requests, due_s, streams=True))
    counts = load.counts
    first_s, whole_s = in_process(model, due_s)
    first_ms = 1e3 * (median(counts.first_s) - median(first_s))
    whole_ms = 1e3 * (median(counts.whole_s) - median(whole_s))
    inside = f"in the process: TTFT {1e3 * median(first_s):.1f} ms, whole {1e3 * median(whole_s):.1f} ms"
    added = f"{first_ms:>9.2f} ms to the first token, {whole_ms:.2f} ms to the end"
    return f"{added} ({inside})  {load.cpu(counts.num_events)}"


def in_process(model: str, due_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """Seconds to the first text and to the end of each request without a server: as `LLM` does it, texts become token
    ids, and token ids texts, in the thread that runs the steps."""
    os.environ[STEP_MS] = str(LATENCY_STEP_MS)
    engine, tokenizer = FreeEngine(EngineConfig(model=model)), open_checkpoint(find_gguf(model)).tokenizer()
    params = SamplingParams(max_tokens=LATENCY_TOKENS, ignore_eos=True)
    outputs: OutputProcessor[int] = OutputProcessor(tokenizer)
    first_s: dict[int, float] = {}
    whole_s: dict[int, float] = {}
    upcoming = 0
    start = time.perf_counter()
    while len(whole_s) < len(due_s):
        while upcoming < len(due_s) and due_s[upcoming] <= time.perf_counter() - start:
            ids, now = tokenizer.encode(TEXT), time.monotonic()
            outputs.add(str(upcoming), upcoming, prompt_token_ids=ids, params=params, arrival_time=now)
            engine.add_request(CoreRequest(request_id=str(upcoming), prompt_token_ids=ids, max_tokens=LATENCY_TOKENS))
            upcoming += 1
        if not engine.has_unfinished_requests:
            time.sleep(max(0.0, start + due_s[upcoming] - time.perf_counter()))
            continue
        processed = outputs.process(engine.step())
        deltas = [*processed.first, *processed.others]
        now = time.perf_counter() - start
        for number, delta in deltas:
            first_s.setdefault(number, now - due_s[number])
            if delta.finish_reason is not None:
                whole_s[number] = now - due_s[number]
    return list(first_s.values()), list(whole_s.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used (smollm2-135m)")
    parser.add_argument("--what", nargs="+", choices=("free", "paced", "short", "added"), default=None, help="(all)")
    parser.add_argument("--streams", type=int, default=64, help="at once (64)")
    parser.add_argument("--rates", type=int, nargs="+", default=[5_000, 10_000, 20_000], help="of `paced`, tokens/s")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log-level", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.port, args.log_level)
        return
    what = args.what or ("free", "paced", "short", "added")
    scale = 1 if args.quick else 4
    if "free" in what or "short" in what:
        with server(args.model, 0.0) as process:
            if "free" in what:
                figures = measure_streams(process, args.model, args.streams * 4 * scale, args.streams, 256)
                print(f"free              {figures}   (bar: {BARS['free']:,})", flush=True)
            for path in ("/v1/completions", "/v1/chat/completions") if "short" in what else ():
                figures = measure_short(process, args.model, path, 500 * scale, 32)
                print(f"short {path[4:8]:12}{figures}   (bar: {BARS['short']})", flush=True)
    for rate in args.rates if "paced" in what else ():
        with server(args.model, 1e3 * args.streams / rate) as process:
            figures = measure_streams(process, args.model, args.streams * scale, args.streams, 256)
            print(f"paced {rate:<12,}{figures}", flush=True)
    if "added" in what:
        print(f"added             {measure_added(args.model, 200 * scale)}   (bar: {BARS['added']:g})", flush=True)


def serve(model: str, port: int, log_level: str) -> None:
    """A server in this process, until SIGTERM."""
    from jaxllm.server.commands.serve import serve
    from jaxllm.server.server_config import ServerConfig

    config = ServerConfig(port=port, served_model_name=[model], log_level=log_level)
    serve(EngineConfig(model=model), config, engine="free_engine:FreeEngine")


class _Load:
    """A load that has run, and what everybody used for it."""

    def __init__(self, process: ServerProcess, load: Coroutine[Any, Any, Counts]) -> None:
        before, own_before = process.cpu_s(), time.process_time()
        self.counts = uvloop.run(load)
        self._own_s = time.process_time() - own_before
        self._worker_s, self._engine_s = (now - then for now, then in zip(process.cpu_s(), before, strict=True))

    def cpu(self, number: int) -> str:
        times = (self._worker_s, self._engine_s, self._own_s)
        return "CPU {:.0f} + {:.0f} + {:.0f} µs".format(*(1e6 * seconds / number for seconds in times))


if __name__ == "__main__":
    main()
