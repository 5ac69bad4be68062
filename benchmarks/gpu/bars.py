"""What paged attention must reach on a GPU, and whether it did."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kernel_workload import Workload

OURS = "gpu"
PLAUSIBLE_SHARE = 1.15  # A copy also writes, which costs more than reading; nothing else makes attention the faster.


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the card reaches in the same run: bytes/s of a copy, read and written ones; FLOP/s of a bfloat16 product."""

    copy_bytes_per_s: float
    product_flops_per_s: float


@dataclass(kw_only=True)
class Measured:
    """A step, and what each system took for it: `figures` (with "median_s"), or an "error"."""

    step: Workload
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        return self.step.q_len == 1

    def seconds(self, system: str) -> float | None:
        """The median; None where the system failed or was not run."""
        return self.figures.get(system, {}).get("median_s")

    def rate(self, system: str) -> float | None:
        """Bytes/s of the keys and values that a decode must read; FLOP/s of the products that a prefill must make."""
        seconds = self.seconds(system)
        return None if seconds is None else (self.step.kv_bytes if self.is_decode else self.step.flops) / seconds

    def share(self, system: str, machine: Machine) -> float | None:
        """The rate, as a part of what the machine reaches."""
        rate = self.rate(system)
        if rate is None:
            return None
        return rate / (machine.copy_bytes_per_s if self.is_decode else machine.product_flops_per_s)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Where it `applies`: the least part of the machine's rate that ours is to have, or of our time for a peer's."""

    name: str
    applies: Callable[[Workload], bool]
    at_least: float = 1.0
    goal: float | None = None
    peer: str | None = None

    def value(self, measured: Measured, machine: Machine) -> float | None:
        """Part of the machine's rate, or the peer's time over ours; None where one of them is missing."""
        if self.peer is None:
            return measured.share(OURS, machine)
        ours, peers = measured.seconds(OURS), measured.seconds(self.peer)
        return None if ours is None or peers is None else peers / ours


BARS = (
    Bar(
        name="decode, batch >= 32, context >= 4k: of the copy's bandwidth",
        applies=lambda step: step.q_len == 1 and step.num_seqs >= 32 and step.kv_len >= 4096,
        at_least=0.8,
        goal=0.9,
    ),
    Bar(
        name="decode, batch 1, context 32k: of the copy's bandwidth",
        applies=lambda step: step.q_len == 1 and step.num_seqs == 1 and step.kv_len == 32_768,
        at_least=0.5,
    ),
    Bar(
        name="prefill, 4k to 16k, heads of 128: of the product's FLOP/s",
        applies=lambda step: step.q_len > 1 and 4096 <= step.kv_len <= 16_384 and step.head_dim == 128,
        at_least=0.65,
        goal=0.75,
    ),
    Bar(name="never slower than xla: its time / ours", applies=lambda step: True, peer="xla"),
    Bar(
        name="decode, never slower than torch, contiguous: its time / ours",
        applies=lambda step: step.q_len == 1,
        peer="torch",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """met: None where no step of the bar was measured. worst: the step of `value`, the least of all."""

    bar: Bar
    met: bool | None
    value: float | None = None
    worst: Workload | None = None
    num_measured: int = 0
    num_missing: int = 0


def judge(measured: Sequence[Measured], machine: Machine) -> Iterator[Verdict]:
    """A verdict for each bar. A step at which ours failed misses each of its bars, also that of a peer."""
    for bar in BARS:
        steps = [each for each in measured if bar.applies(each.step)]
        values = [(value, each.step) for each in steps if (value := bar.value(each, machine)) is not None]
        failed = any("error" in each.figures.get(OURS, {}) for each in steps)
        if not values:
            yield Verdict(bar=bar, met=False if failed else None, num_missing=len(steps))
            continue
        value, worst = min(values, key=lambda pair: pair[0])
        yield Verdict(
            bar=bar,
            met=value >= bar.at_least and not failed,
            value=value,
            worst=worst,
            num_measured=len(values),
            num_missing=len(steps) - len(values),
        )


def describe(verdict: Verdict) -> str:
    bar = verdict.bar
    word = {True: "met", False: "MISSED", None: "not measured"}[verdict.met]
    aim = f"at least {bar.at_least}" + (f", goal {bar.goal}" if bar.goal else "")
    line = f"{word:14}{bar.name} ({aim})"
    if verdict.value is not None and verdict.worst is not None:
        step = verdict.worst
        line += f": {verdict.value:.2f} at the worst of {verdict.num_measured}, {step.num_heads}/{step.num_kv_heads} "
        line += f"heads, batch {step.num_seqs}, {step.kv_len:,} tokens"
        if bar.goal and verdict.met:
            line += ", goal reached" if verdict.value >= bar.goal else ", goal not reached"
    if verdict.num_missing:
        line += f"; {verdict.num_missing} without a figure"
    return line


def implausible(measured: Sequence[Measured], machine: Machine) -> Iterator[str]:
    """A line for each figure that is beyond the machine: then a cache has answered, or less was done than was asked."""
    for each in measured:
        for system in each.figures:
            share = each.share(system, machine)
            if share is not None and share > PLAUSIBLE_SHARE:
                yield (
                    f"IMPLAUSIBLE   {system}, {each.step.num_heads}/{each.step.num_kv_heads} heads, batch "
                    f"{each.step.num_seqs}, {each.step.kv_len:,} tokens: {share:.2f} of what the machine reaches"
                )


def as_json(verdict: Verdict) -> Mapping[str, Any]:
    return {"bar": verdict.bar.name, "met": verdict.met, "value": verdict.value, "missing": verdict.num_missing}
