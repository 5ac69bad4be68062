"""What a command measured: the one line at its end."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from jaxllm import RequestOutput


@dataclass
class Figures:
    """Times of a start and of the answers after it, in seconds.

    seconds: in which answers were made, waiting for the user left out.
    """

    start_up_s: float
    seconds: float = 0.0
    outputs: list[RequestOutput] = field(default_factory=list)

    def add(self, outputs: Iterable[RequestOutput], seconds: float) -> None:
        self.outputs += outputs
        self.seconds += seconds

    def __str__(self) -> str:
        """TTFT is the time to the first token, TPOT the time per token after it: medians over the answers."""
        parts = [f"start-up {self.start_up_s:.1f} s"]
        metrics = [output.metrics for output in self.outputs if output.metrics is not None]
        for name, times in (("TTFT", [m.ttft_s for m in metrics]), ("TPOT", [m.tpot_s for m in metrics])):
            if known := [time for time in times if time is not None]:
                parts.append(f"{name} {1e3 * median(known):,.1f} ms")
        if self.outputs:
            num_tokens = sum(len(output.outputs[0].token_ids) for output in self.outputs)
            rate = num_tokens / max(self.seconds, 1e-9)
            parts.append(f"{num_tokens:,} tokens in {self.seconds:.1f} s, {rate:,.1f} tokens/s")
        return " · ".join(parts)
