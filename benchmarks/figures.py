"""What was measured of a system, its best over all runs, and the tables of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
QUIET = 0.05
"""Part of the machine that other processes may use before a run counts as disturbed."""


@dataclass
class Figures:
    """tokens_per_s: best by name, "prefill_N" (N prompts of 512) and "output_N" (N requests at once, 128 in, 128 out).

    cold_startup_s: of the first run, with empty caches; warm_startup_s: the best of the others.
    others: of each run, the part of the machine's CPU time that other processes took.
    """

    version: str = ""
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    cold_startup_s: float | None = None
    warm_startup_s: float | None = None
    peak_bytes: int = 0
    sample: list[int] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def add(self, measurements: Sequence[Mapping[str, Any]], others: float) -> None:
        """Takes over what a run printed."""
        self.others.append(others)
        for line in measurements:
            match line["measurement"]:
                case "startup":
                    self.version = line["version"]
                    if self.cold_startup_s is None:
                        self.cold_startup_s = line["seconds"]
                    else:
                        self.warm_startup_s = min(line["seconds"], self.warm_startup_s or line["seconds"])
                case "sample":
                    self.sample = line["token_ids"]
                case "memory":
                    self.peak_bytes = max(line["peak_bytes"], self.peak_bytes)
                case name:
                    self.tokens_per_s[name] = max(line["tokens_per_s"], self.tokens_per_s.get(name, 0.0))


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What our tokens/s must be at least, as a multiple of `peer`'s, or of the best peer's."""

    name: str
    at_least: float
    goal: float | None = None
    peer: str | None = None


BARS = (
    Bar(name="prefill_1", at_least=1.3),
    Bar(name="prefill_8", at_least=1.3),
    Bar(name="output_32", at_least=1.5, goal=2.0),
    Bar(name="output_8", at_least=1.0),
    Bar(name="output_1", at_least=1.1, peer="vllm"),
    Bar(name="output_1", at_least=0.4, peer="llama.cpp"),
)


def label(name: str) -> str:
    """The words for a name of `Figures.tokens_per_s`."""
    kind, number = name.split("_")
    if kind == "prefill":
        return "prefill, 1 prompt" if number == "1" else f"prefill, {number} prompts"
    return "output, 1 request" if number == "1" else f"output, {number} at once"


def format_table(figures: Mapping[str, Figures]) -> str:
    """Systems side by side, as a Markdown table."""

    def row(title: str, form: str, values: Iterable[float | None]) -> list[str]:
        return [title, *("–" if value is None else format(value, form) for value in values)]

    every = figures.values()
    names = list(dict.fromkeys(name for each in every for name in each.tokens_per_s))
    rows = [
        ["", *(f"{name} {each.version}" for name, each in figures.items())],
        *(row(f"{label(n)} (tokens/s)", ",.0f", (each.tokens_per_s.get(n) for each in every)) for n in names),
        row("start-up, empty caches (s)", ".1f", (each.cold_startup_s for each in every)),
        row("start-up, filled caches (s)", ".1f", (each.warm_startup_s for each in every)),
        row("peak memory (MiB)", ",.0f", (each.peak_bytes / MIB for each in every)),
        row("others' use of the machine, least (%)", ".0f", (100 * min(each.others) for each in every)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    rule = " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])


def format_ratios(figures: Mapping[str, Figures], ours: str) -> str:
    """A line for each bar of which both sides were measured."""
    lines = []
    for bar in BARS:
        peers = {
            name: each.tokens_per_s[bar.name]
            for name, each in figures.items()
            if bar.name in each.tokens_per_s and name != ours and bar.peer in (None, name)
        }
        if not peers or ours not in figures or bar.name not in figures[ours].tokens_per_s:
            continue
        best = max(peers, key=peers.__getitem__)
        ratio = figures[ours].tokens_per_s[bar.name] / peers[best]
        aim = f"at least {bar.at_least}" + (f", goal {bar.goal}" if bar.goal else "")
        verdict = "met" if ratio >= bar.at_least else "MISSED"
        disturbed = [name for name in (ours, best) if min(figures[name].others) > QUIET]
        if disturbed:
            verdict += f", but no run of {' or '.join(disturbed)} was undisturbed"
        lines.append(f"{label(bar.name):20}{ratio:6.2f} x {best:12} ({aim}): {verdict}")
    return "\n".join(lines)
