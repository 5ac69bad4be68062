"""What a command measured: the one line at its end."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from jaxllm.server.commands.answer import Answer


@dataclass
class Figures:
    """Times of a start and of the answers after it, in seconds.

    start_up_s: None where nothing was started.
    seconds: in which answers were made, waiting for the user left out.
    """

    start_up_s: float | None = None
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def add(self, answers: Iterable[Answer], seconds: float) -> None:
        self.answers += answers
        self.seconds += seconds

    def __str__(self) -> str:
        """TTFT is the time to the first token, TPOT the time per token after it: medians over the answers."""
        parts = [] if self.start_up_s is None else [f"start-up {self.start_up_s:.1f} s"]
        for name in ("ttft", "tpot"):
            times = (getattr(answer, f"{name}_s") for answer in self.answers)
            if known := [time for time in times if time is not None]:
                parts.append(f"{name.upper()} {1e3 * median(known):,.1f} ms")
        if counts := [answer.num_output_tokens for answer in self.answers if answer.num_output_tokens is not None]:
            rate = sum(counts) / max(self.seconds, 1e-9)
            parts.append(f"{sum(counts):,} tokens in {self.seconds:.1f} s, {rate:,.1f} tokens/s")
        return " · ".join(parts)
