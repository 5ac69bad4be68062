"""The options of `jaxllm bench serve`."""

import argparse
import json
from pathlib import Path
from typing import Any

WORKLOADS = ("random", "sharegpt", "shared-prefix", "trace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="of the server, such as http://localhost:8000")
    add("--model", metavar="NAME", help="as the server names it (default: the first of its /v1/models)")
    add("--api-key", default="", metavar="KEY", help="or the environment variable JAXLLM_API_KEY")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="(default: completions)")
    add("--debug", action="store_true", help="show where an error comes from")

    group = parser.add_argument_group("how requests come (one of these; default: --concurrency 32)")
    how = group.add_mutually_exclusive_group()
    how.add_argument("--request-rate", type=_positive, nargs="+", metavar="R", help="a second; inf: all at once")
    how.add_argument("--concurrency", type=_count, nargs="+", metavar="N", help="at once; several: one after another")
    group.add_argument(
        "--burstiness", type=_positive, metavar="X", help="of --request-rate: 1 (default) is Poisson, less is bursty"
    )
    group.add_argument("--speed", type=_positive, metavar="X", help="of a trace: 2 is twice as fast (default: 1)")

    group = parser.add_argument_group("what they are")
    group.add_argument("--workload", choices=WORKLOADS, default="random", help="(default: random)")
    group.add_argument("--num-requests", type=_count, metavar="N", help="(default: 200; a trace: all)")
    group.add_argument("--input-len", type=_count, metavar="N", help="tokens (default: 512; after a prefix: 128)")
    group.add_argument("--output-len", type=_count, metavar="N", help="tokens (default: 128)")
    group.add_argument("--spread", type=_share, metavar="X", help="random: lengths within ± this part (default: 0)")
    group.add_argument("--num-prefixes", type=_count, metavar="N", help="shared-prefix (default: 8)")
    group.add_argument("--prefix-len", type=_count, metavar="N", help="shared-prefix: tokens (default: 1024)")
    group.add_argument("--trace", metavar="FILE", help="as `python -m jaxllm.scheduler.simulate --example` prints one")
    group.add_argument("--tenant-key", action="append", default=[], metavar="NAME=KEY", help="of a trace's tenant")
    group.add_argument("--token-ids", action="store_true", help="prompts are random token ids (completions only)")
    group.add_argument("--vocab-size", type=_count, metavar="N", help="of --token-ids: all are below (default: 30000)")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly the wanted number of tokens (vLLM's field ignore_eos)",
    )
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields of each body")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    group.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before, at once (default: 4)")
    group.add_argument("--timeout-s", type=_positive, default=600.0, metavar="X", help="of a request (default: 600)")

    group = parser.add_argument_group("what is reported")
    group.add_argument("--goodput", nargs="+", type=_bound, default=[], metavar="NAME=MS", help="ttft, tpot, itl, e2e")
    group.add_argument("-o", "--output", type=Path, metavar="FILE", help="all figures, and each request, as JSON")
    group.add_argument("--chart", type=Path, metavar="FILE", help="a PNG picture (needs matplotlib)")


def refuse_what_would_be_ignored(args: argparse.Namespace) -> None:
    """Ends the program for options that do not belong together."""
    is_trace = args.workload == "trace"
    own = {
        "random": ("input_len", "output_len", "spread"),
        "sharegpt": (),
        "shared-prefix": ("input_len", "output_len", "num_prefixes", "prefix_len"),
        "trace": ("trace", "speed"),
    }
    for name in sorted({name for names in own.values() for name in names} - set(own[args.workload])):
        if getattr(args, name) is not None:
            args.parser.error(f"--{name.replace('_', '-')} does not belong to --workload {args.workload}")
    if is_trace and args.trace is None:
        args.parser.error("--workload trace needs --trace FILE")
    if args.tenant_key and not is_trace:
        args.parser.error("--tenant-key belongs to --workload trace")
    if args.burstiness is not None and not args.request_rate:
        args.parser.error("--burstiness belongs to --request-rate")
    if args.speed is not None and (args.request_rate or args.concurrency):
        args.parser.error("--speed is of the trace's own times; --request-rate and --concurrency replace them")
    if args.token_ids and args.endpoint == "chat":
        args.parser.error("--token-ids needs --endpoint completions: a chat's messages are texts")
    if args.vocab_size is not None and not args.token_ids:
        args.parser.error("--vocab-size belongs to --token-ids")
    if args.warmup < 0:
        args.parser.error(f"--warmup is {args.warmup}; it must be 0 or more")
    for name in ("output", "chart"):
        if (path := getattr(args, name)) is not None and not path.parent.is_dir():
            args.parser.error(f"--{name} is {path}, and there is no folder {path.parent}")
    if taken := {"stream", "stream_options", "n"} & args.extra_body.keys():
        args.parser.error(f"--extra-body may not have {', '.join(sorted(taken))}: streams of one answer are measured")


def _positive(text: str) -> float:
    return _number(text, float, lambda value: value > 0, "a number above 0")


def _share(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _count(text: str) -> int:
    return _number(text, int, lambda value: value >= 1, "an integer of at least 1")


def _number(text: str, kind: Any, is_good: Any, what: str) -> Any:
    try:
        if is_good(value := kind(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _bound(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in ("ttft", "tpot", "itl", "e2e"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MILLISECONDS with ttft, tpot, itl or e2e as the name")
    return name, _positive(value)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
