"""The command `jaxllm bench serve`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm import ConfigError, __version__
from jaxllm.server.commands.bench.arguments import add_arguments, refuse_what_would_be_ignored
from jaxllm.server.commands.terminal import note, show

if TYPE_CHECKING:
    from jaxllm.server.commands.bench.endpoint import Endpoint
    from jaxllm.server.commands.bench.load import Load
    from jaxllm.server.commands.bench.prompts import TextPrompts, TokenIdPrompts
    from jaxllm.server.commands.bench.result import Result
    from jaxllm.server.commands.bench.workload import BenchRequest
    from jaxllm.server.commands.client.http_client import HttpClient

ABOUT = """\
Measures a server that speaks OpenAI's API, jaxllm or another, over HTTP: an open loop with random arrivals
(--request-rate), a fixed number of requests at once (--concurrency), or a recorded trace.

TTFT is the time to the first token, from when the request was due; TPOT the mean time of each token after it; ITL the
gaps between events of a stream; E2E the time to the end of the answer. All are measured where the client reads
its socket, over connections that are kept open. Tokens are as many as the server says."""
EXAMPLES = """\
examples:
  jaxllm bench serve --url http://localhost:8000 --workload sharegpt --request-rate 1 2 4 --goodput ttft=500 tpot=50
  jaxllm bench serve --url http://localhost:8000 --concurrency 8 32 --input-len 512 --output-len 128 --chart load.png
  jaxllm bench serve --url http://localhost:8000 --workload trace --trace trace.jsonl -o result.json"""


def add_parser(commands: Any) -> None:
    """Adds `bench` to what `add_subparsers` returned."""
    bench = commands.add_parser("bench", help="measure a server", description="Benchmarks.", allow_abbrev=False)
    bench.set_defaults(run=_print_help(bench), parser=bench)
    serve = bench.add_subparsers(title="commands", metavar="COMMAND").add_parser(
        "serve",
        help="measure a server over HTTP",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(serve)
    serve.set_defaults(run=run, parser=serve)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the files. 1 if any request failed."""
    refuse_what_would_be_ignored(args)
    if args.chart:
        _check_matplotlib()
    for path in filter(None, (args.output, args.chart)):
        _check_writable(path)
    from jaxllm.server.commands.client import http_client

    return http_client.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    clients = _clients(args)
    try:
        return await _run_with(args, clients)
    finally:
        for client in clients.values():
            await client.close()


async def _run_with(args: argparse.Namespace, clients: "dict[str, HttpClient]") -> int:
    from jaxllm.server.commands.bench.endpoint import Endpoint, first_model
    from jaxllm.server.commands.bench.load import Load
    from jaxllm.server.commands.bench.result import table

    client = clients[""]
    endpoint = Endpoint(args.endpoint, args.model or await first_model(client), args.ignore_eos, args.extra_body)
    prompts = await _prompts(args, endpoint, client)
    load = Load(endpoint, clients, args.timeout_s)
    if args.workload == "trace":
        _tell_of_tenants_without_key(args, clients)
    await _warm_up(args, load, prompts)
    results = []
    for number, (label, rate, concurrency) in enumerate(_loads(args)):
        results.append(await _measure(args, load, prompts, number, label, rate, concurrency))

    title = f"{endpoint.model} at {client.url}{endpoint.path}, {args.workload}"
    try:
        show(f"{title}\n{table(results)}\n")
        for result in results:
            for warning in result.warnings():
                note(f"warning: {result.label}: {warning}" if len(results) > 1 else f"warning: {warning}")
    finally:
        if args.output:
            _write(args.output, _report(args, endpoint, client.url, results))
    if args.chart:
        from jaxllm.server.commands.bench.chart import draw

        try:
            draw(results, title, args.chart)
        except OSError as error:
            raise ConfigError(f"--chart {args.chart} cannot be written: {error}") from error
    return int(any(len(result.ok) < len(result.measured.samples) for result in results))


async def _measure(
    args: argparse.Namespace,
    load: "Load",
    prompts: "TextPrompts | TokenIdPrompts",
    number: int,
    label: str,
    rate: float | None,
    concurrency: int | None,
) -> "Result":
    from jaxllm.server.commands.bench.result import Result

    seed = args.seed + number  # Other prompts in each load: the server's cache of prefixes knows those of the last.
    requests = _requests(args, seed, rate)
    texts = (prompts.make(request, seed, index) for index, request in enumerate(requests))
    with _progress_bar(len(requests), label) as progress:
        measured = await load.measure(requests, texts, concurrency=concurrency, progress=progress)
    return Result(label, measured, dict(args.goodput))


async def _prompts(
    args: argparse.Namespace, endpoint: "Endpoint", client: "HttpClient"
) -> "TextPrompts | TokenIdPrompts":
    from jaxllm.server.commands.bench.prompts import TokenIdPrompts

    return TokenIdPrompts(args.vocab_size or 30_000) if args.token_ids else await endpoint.calibrate(client)


async def _warm_up(args: argparse.Namespace, load: "Load", prompts: "TextPrompts | TokenIdPrompts") -> None:
    """Sends a few requests like those that follow. Raises AnswerError if one of them fails."""
    from jaxllm.server.commands.bench.endpoint import AnswerError
    from jaxllm.server.commands.bench.load import Progress

    seed = args.seed + 1_000_003
    requests = _requests(args, seed, None)[: args.warmup]
    texts = [prompts.make(request, seed, index) for index, request in enumerate(requests)]
    if requests:
        measured = await load.measure(requests, texts, concurrency=len(requests), progress=Progress())
        if error := next((sample.error for sample in measured.samples if sample.error), None):
            raise AnswerError(f"a request of the warm-up failed: {error}")


def _loads(args: argparse.Namespace) -> list[tuple[str, float | None, int | None]]:
    """(label, request rate, concurrency) of each load."""
    if args.request_rate:
        return [(f"{rate:g} requests/s", rate, None) for rate in args.request_rate]
    if args.workload == "trace" and not args.concurrency:
        return [(f"the trace, {args.speed or 1:g} × its speed", None, None)]
    return [(f"{concurrency} at once", None, concurrency) for concurrency in args.concurrency or [32]]


def _requests(args: argparse.Namespace, seed: int, rate: float | None) -> "list[BenchRequest]":
    import numpy as np

    from jaxllm.server.commands.bench import workload

    rng = np.random.default_rng(seed)
    count, output_len = args.num_requests or 200, args.output_len or 128
    if args.workload == "random":
        requests = workload.random_requests(count, args.input_len or 512, output_len, args.spread or 0.0, rng)
    elif args.workload == "sharegpt":
        requests = workload.sharegpt_requests(count, rng)
    elif args.workload == "shared-prefix":
        lens = (args.prefix_len or 1024, args.input_len or 128, output_len)
        requests = workload.shared_prefix_requests(count, args.num_prefixes or 8, *lens, rng)
    else:
        requests = workload.trace_requests(args.trace, args.speed or 1.0)[: args.num_requests]
    return requests if rate is None else workload.arriving(requests, rate, args.burstiness or 1.0, rng)


def _clients(args: argparse.Namespace) -> "dict[str, HttpClient]":
    """By tenant; "" for all others."""
    from jaxllm.server.commands.client.http_client import HttpClient

    keys = {"": args.api_key or os.environ.get("JAXLLM_API_KEY", "")}
    for pair in args.tenant_key:
        name, equals, key = pair.partition("=")
        if not (name and equals and key):
            args.parser.error(f"--tenant-key is {pair!r}; it must be NAME=KEY")
        keys[name] = key
    try:
        return {name: HttpClient(args.url, api_key=key) for name, key in keys.items()}
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _tell_of_tenants_without_key(args: argparse.Namespace, clients: "dict[str, HttpClient]") -> None:
    from jaxllm.server.commands.bench.workload import tenants_of

    tenants = tenants_of(_requests(args, args.seed, None))
    if others := [tenant for tenant in tenants if tenant not in clients]:
        note(f"warning: to the server these tenants of the trace are one: {', '.join(others)} (see --tenant-key)")
    if unknown := sorted(clients.keys() - {"", *tenants}):
        args.parser.error(f"--tenant-key has {', '.join(unknown)}; the trace has {', '.join(map(repr, tenants))}")


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--chart needs matplotlib, which is not installed: pip install matplotlib") from error


def _report(args: argparse.Namespace, endpoint: "Endpoint", url: str, results: "Sequence[Result]") -> dict[str, Any]:
    """Everything that was asked for, keys left out, and everything that came of it."""
    secret = ("run", "parser", "debug", "api_key", "tenant_key", "output", "chart", "goodput", "url", "model")
    options = {name: value for name, value in vars(args).items() if name not in secret and value is not None}
    return {
        "command": "jaxllm bench serve",
        "version": __version__,
        "url": url,
        "model": endpoint.model,
        "options": options,
        "results": [result.as_dict() for result in results],
    }


def _check_writable(path: Path) -> None:
    """Before anything is measured."""
    is_new = not path.exists()
    try:
        open(path, "ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error}") from error


@contextlib.contextmanager
def _progress_bar(total: int, label: str) -> Iterator[Any]:
    from tqdm import tqdm

    class Bar:
        def done(self, sample: Any) -> None:
            num_failed[0] += sample.error is not None
            if num_failed[0]:
                bar.set_postfix_str(f"{num_failed[0]} failed", refresh=False)
            bar.update()

    num_failed = [0]
    with tqdm(total=total, desc=label, unit="request", disable=None, file=sys.stderr, mininterval=0.5) as bar:
        yield Bar()


def _print_help(parser: argparse.ArgumentParser) -> Any:
    def run(args: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    return run
