"""Our paged attention on a GPU, beside what the card reaches and beside other attention, in one run.

    python -m benchmarks.gpu.attention --check --json gpu.json         # numerics first, then all shapes
    python -m benchmarks.gpu.attention --quick                         # the steps of the bars for Llama-3.1-8B's heads
    python -m benchmarks.gpu.attention --models llama-8b --max-minutes 9

Decodes are shown as bytes/s of the keys and values that they must read, prompts as FLOP/s of what causality leaves of
scores and outputs; each also as a part of what a large copy, and a large product, reach on this card in this run.

  gpu         this package's kernels; the new keys and values are written into their pages too
  xla         this package's plain XLA; the same work
  cudnn       jax.nn.dot_product_attention(implementation="cudnn") on contiguous keys and values
  triton      JAX's own kernel for decodes over pages, jax.experimental.pallas.ops.gpu.paged_attention
  torch       scaled_dot_product_attention on contiguous keys and values, its fastest backend (--torch-python)
  flashinfer  its kernels over pages (--torch-python)
  vllm        its Triton kernel over pages (--torch-python)

Pages lie anywhere. Keys and values of successive calls lie in different places, so that the L2 cache does not answer
(steps.py); many calls make a program, so that launches are not measured (timing.py); the time of one call alone
is shown as latency. Each system runs in a process of its own, whose failure leaves the others (jobs.py). XLA gets
the options that the engine gives it; $XLA_FLAGS goes before them.

Where there is no GPU, the same kernels are compiled for the card of --card, and what they take of it is printed
(static.py).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.bars import OURS, Machine, Measured, as_json, describe, implausible, judge
from benchmarks.gpu.jobs import UnavailableError, run_jobs
from benchmarks.gpu.steps import BATCHES, CONTEXTS, HEADS, PROMPTS, Job, decode_jobs, prefill_jobs
from benchmarks.gpu.timing import SAMPLES
from jaxllm.pallas_kernels.gpu_target import CARDS

TORCH = Path(__file__).resolve().parents[1] / "peers" / "gpu_torch.py"
TORCH_SYSTEMS = ("torch", "flashinfer", "vllm")
SYSTEMS = ("gpu", "xla", "cudnn", "triton", *TORCH_SYSTEMS)
QUICK_SAMPLES = 3
MEMORY_SHARE = 0.8  # Of what JAX may take of the card's, for a step.


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=HEADS, help="whose heads (all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="what is measured (all)")
    parser.add_argument("--batches", nargs="*", type=_positive, help=f"of decodes; none for no decodes {BATCHES}")
    parser.add_argument("--contexts", nargs="+", type=_positive, help=f"of decodes, tokens {CONTEXTS}")
    parser.add_argument("--prompts", nargs="*", type=_prompt, help=f"tokens; none for no prefill {PROMPTS}")
    parser.add_argument("--page-size", type=_positive, default=64, help="tokens (64)")
    parser.add_argument("--quick", action="store_true", help="few steps and samples, for what is not given by itself")
    parser.add_argument("--check", action="store_true", help="first compare the kernels with the reference")
    parser.add_argument("--check-programs", type=_positive, default=64, help="that are drawn for --check (64)")
    parser.add_argument("--max-minutes", type=float, default=90.0, help="what has not begun by then is left out (90)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a step of a system (180)")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch (this one)")
    parser.add_argument(
        "--card", nargs="+", choices=CARDS, default=["h200"], help="to compile for without a GPU (h200)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file, as they come")
    args = parser.parse_args(arguments)
    quick = args.quick
    defaults = {
        "models": ["llama-8b"] if quick else list(HEADS),
        "batches": [1, 32] if quick else list(BATCHES),
        "contexts": [4096, 32_768] if quick else list(CONTEXTS),
        "prompts": [4096, 16_384] if quick else list(PROMPTS),
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.samples = QUICK_SAMPLES if quick else SAMPLES
    return args


def main() -> None:
    args = parse_args()
    deadline = time.monotonic() + 60 * args.max_minutes
    (found,) = run_jobs([sys.executable, "-m", "benchmarks.gpu.machine"], [{}], timeout_s=args.timeout)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": sys.argv[1:],
        "machine": found,
    }
    if found.get("platform") == "gpu":
        measure_on_gpu(args, record, deadline)
    elif "error" in found:
        raise SystemExit(f"the machine was not to be measured: {found['error']}")
    else:
        print(f"no GPU here (JAX found {found['platform']}): the kernels are compiled for {', '.join(args.card)}")
        record["kernels"] = compile_only(args)
        write(record, args.json)


def compile_only(args: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.gpu import static

    kernels = static.compile_kernels(args.card, args.models, args.page_size)
    static.print_figures(kernels)
    return kernels


def measure_on_gpu(args: argparse.Namespace, record: dict[str, Any], deadline: float) -> None:
    found = record["machine"]
    machine = Machine(copy_bytes_per_s=found["copy_bytes_per_s"], product_flops_per_s=found["product_flops_per_s"])
    print_machine(found, record["date"])
    if args.check:
        record["check"] = check(args, deadline)
        write(record, args.json)
    measured: list[Measured] = []
    for heads, models in shapes(args.models).items():
        of_heads = [Measured(step=job.step) for job in plan(args, heads)]
        measured += of_heads
        for system in args.systems:
            run_system(system, args, of_heads, list(plan(args, heads)), found["memory_bytes"], deadline)
            record["steps"] = [{**asdict(each.step), "figures": each.figures} for each in measured]
            write(record, args.json)
        title = f"{', '.join(models)}: {heads[0]}/{heads[1]} heads of {heads[2]}, bfloat16, pages of {args.page_size}"
        print_tables(title, of_heads, args.systems, machine)
    print()
    verdicts = list(judge(measured, machine))
    for line in [*map(describe, verdicts), *implausible(measured, machine)]:
        print(line)
    if any("error" in program for program in record.get("check", [])):
        print("WRONG         numerics, as said above: these are the figures of kernels that are not right")
    record["bars"] = [as_json(verdict) for verdict in verdicts]
    write(record, args.json)


def shapes(models: Sequence[str]) -> dict[tuple[int, int, int], list[str]]:
    """Models by their heads, of which some have the same."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for model in models:
        found.setdefault(HEADS[model], []).append(model)
    return found


def plan(args: argparse.Namespace, heads: tuple[int, int, int]) -> Iterator[Job]:
    yield from decode_jobs(heads, args.batches, args.contexts, args.page_size)
    yield from prefill_jobs(heads, args.prompts, args.page_size)


def run_system(
    system: str,
    args: argparse.Namespace,
    measured: Sequence[Measured],
    jobs: Sequence[Job],
    memory_bytes: int | None,
    deadline: float,
) -> None:
    """Adds what a system took to each step, or why there is no figure."""
    if system in TORCH_SYSTEMS:
        command = [args.torch_python, str(TORCH), system]
    else:
        command = [sys.executable, "-m", "benchmarks.gpu.jax_kernels", system]
    fitting = []
    for each, job in zip(measured, jobs, strict=True):
        if system == "triton" and not job.is_decode:
            continue
        if memory_bytes is not None and job.memory_bytes > MEMORY_SHARE * memory_bytes:
            each.figures[system] = {"skipped": f"needs {job.memory_bytes / 2**30:.0f} GiB of the card's memory"}
            continue
        fitting.append((each, job))
    descriptions = [{**asdict(job), "samples": args.samples} for _, job in fitting]
    try:
        answers = run_jobs(command, descriptions, timeout_s=args.timeout, deadline=deadline)
        for (each, _), answer in zip(fitting, answers, strict=True):
            each.figures[system] = answer
            report(system, each)
    except UnavailableError as error:
        print(f"{system} is left out: {error}", flush=True)


def report(system: str, measured: Measured) -> None:
    step, figures = measured.step, measured.figures[system]
    what = f"{step.num_seqs} x {step.kv_len:,}" if measured.is_decode else f"prompt of {step.kv_len:,}"
    said = figures.get("error") or figures.get("skipped") or f"{1e6 * figures['median_s']:,.1f} us"
    print(f"  {system:11}{step.num_heads}/{step.num_kv_heads}  {what:18}{said}", file=sys.stderr, flush=True)


def print_machine(found: dict[str, Any], date: str) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    print(f"{date}; {found['device']} ({found['card']}); {versions}")
    print(
        f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s, bfloat16 product "
        f"{found['product_flops_per_s'] / 1e12:,.0f} TFLOP/s"
    )
    print(f"XLA's options: {found['compiler_options']}")
    if found["others_on_it"]:
        print(f"other processes use this card: {found['others_on_it']}")


def print_tables(title: str, measured: Sequence[Measured], systems: Sequence[str], machine: Machine) -> None:
    for steps, kind, unit, scale in (
        ([each for each in measured if each.is_decode], "decode", "GB/s", 1e9),
        ([each for each in measured if not each.is_decode], "prefill", "TFLOP/s", 1e12),
    ):
        if not steps:
            continue
        print(f"\n{kind}, {title}; {unit} and part of the machine's, then microseconds: ours, and x ours")
        print(format_table(steps, systems, unit, scale, machine))


def format_table(steps: Sequence[Measured], systems: Sequence[str], unit: str, scale: float, machine: Machine) -> str:
    """A Markdown table: a row for each step, with the others' times as multiples of ours."""
    peers = [system for system in systems if system != OURS]
    rows = [["batch", "tokens", unit, "of machine", "us", "best", "latency", *peers]]
    for each in steps:
        step, ours = each.step, each.figures.get(OURS, {})
        row = [f"{step.num_seqs}", f"{step.kv_len:,}"]
        rate, share, seconds = each.rate(OURS), each.share(OURS, machine), each.seconds(OURS)
        if rate is None or share is None or seconds is None:
            row += [_why_not(ours), "", "", "", ""]
        else:
            row += [f"{rate / scale:,.0f}", f"{share:.0%}", *(_us(ours[f"{kind}_s"]) for kind in _KINDS)]
        for peer in peers:
            peers_s = each.seconds(peer)
            if peers_s is None:
                row.append(_why_not(each.figures.get(peer, {})))
            else:
                row.append(f"{_us(peers_s)}" + (f" ({peers_s / seconds:.2f} x)" if seconds else ""))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows)


_KINDS = ("median", "best", "latency")


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def _why_not(figures: dict[str, Any]) -> str:
    return "failed" if "error" in figures else "skipped" if "skipped" in figures else "–"


def check(args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """What check.py says of each program that is drawn; prints what is wrong."""
    from benchmarks.gpu.check import CASES_PER_PROGRAM, draw_jobs

    jobs = list(draw_jobs(args.check_programs))
    command = [sys.executable, "-m", "benchmarks.gpu.check", OURS]
    answers = list(run_jobs(command, jobs, timeout_s=args.timeout, deadline=deadline))
    wrong = [answer for answer in answers if "error" in answer]
    refused = [answer for answer in answers if "refused" in answer]
    right = [answer for answer in answers if "largest_error" in answer]
    print(
        f"numerics: {len(right)} of {len(jobs)} programs, {CASES_PER_PROGRAM} steps each, are as the reference, "
        f"{len(wrong)} are not, {len(refused)} are refused; largest error "
        f"{max((answer['largest_error'] for answer in right), default=float('nan')):.2g}"
    )
    for answer in wrong:
        print(f"  WRONG: {answer['error']}")
    for answer in refused:
        print(f"  refused: {answer['name']}: {answer['refused']}")
    return answers


def write(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _prompt(text: str) -> int:
    if (value := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text}: a prompt has at least 2 tokens, else it is a decode")
    return value


if __name__ == "__main__":
    main()
