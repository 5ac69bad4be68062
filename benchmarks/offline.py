"""jaxllm beside its peers: the same prompts, on the CPU of this machine, in one run.

    python benchmarks/offline.py --model smollm2-135m

Each system runs alone, in a process of its own, with its best settings, in turns (A B C A B C); the best of each
counts. benchmarks/README.md tells what is measured; benchmarks/peers/install.sh installs the peers.
"""

import argparse
import json
import tempfile
from pathlib import Path

from figures import QUIET, Figures, format_ratios, format_table
from systems import OURS, PEERS, System, describe_machine, find_gguf, find_systems, run

from jaxllm.loading.sources import open_checkpoint

HERE = Path(__file__).resolve().parent
SAMPLE = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a demo model or a .gguf file (smollm2-135m)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="whom to compare (all)")
    parser.add_argument("--peers-dir", type=Path, default=HERE.parent / ".venv-peers", help="where they are")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests at once (1 8 32)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system (3)")
    parser.add_argument("--repeats", type=int, default=2, help="of each measurement in a turn (2)")
    parser.add_argument("--quick", action="store_true", help="one round, one repeat")
    parser.add_argument("--no-chart", action="store_true", help="draw no picture")
    parser.add_argument("--output-dir", type=Path, default=HERE / "results", help="of figures, picture, logs")
    args = parser.parse_args()
    if args.quick:
        args.rounds = args.repeats = 1
    return args


def main() -> None:
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    systems = find_systems(args.model, args.peers, args.peers_dir.resolve())
    tokenizer = open_checkpoint(find_gguf(args.model)).tokenizer()
    options = ["--sample", json.dumps(tokenizer.encode(SAMPLE)), "--repeats", str(args.repeats)]
    options += ["--concurrency", *map(str, args.concurrency)]

    print(describe_machine())
    figures = measure(systems, options, args.rounds, args.output_dir)
    print(f"\n{format_table(figures)}\n\n{format_ratios(figures, OURS)}")
    print(f"\nContinuations of {SAMPLE!r}:")
    for name, each in figures.items():
        print(f"  {name:14}{tokenizer.decode(each.sample)!r}")

    results = {"machine": describe_machine(), **{name: vars(each) for name, each in figures.items()}}
    (args.output_dir / "offline.json").write_text(json.dumps(results, indent=2) + "\n")
    if not args.no_chart:
        from chart import draw  # matplotlib: a second of import

        draw(figures, OURS, args.output_dir / "offline.png")
    print(f"\nWritten to {args.output_dir}")


def measure(systems: list[System], options: list[str], rounds: int, log_dir: Path) -> dict[str, Figures]:
    """The figures of each system that ran to its end at least once."""
    figures = {system.name: Figures() for system in systems}
    with tempfile.TemporaryDirectory() as caches:
        for turn in range(1, rounds + 1):
            for system in systems:
                print(f"round {turn} of {rounds}  {system.name:14}", end="", flush=True)
                log = log_dir / f"{system.name}.log"
                result = run(system, options, cache_dir=Path(caches) / system.name, log=log)
                if result.exit_status:
                    print(f"failed with status {result.exit_status}; see {log}")
                    continue
                figures[system.name].add(result.measurements, result.others)
                note = "; DISTURBED: its figures are too low" if result.others > QUIET else ""
                print(f"{result.seconds:6.0f} s  other processes used {result.others:.0%} of the machine{note}")
    return {name: each for name, each in figures.items() if each.tokens_per_s}


if __name__ == "__main__":
    main()
