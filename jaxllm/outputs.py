"""What a request gives back, under vLLM's names."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "timeout"]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt, so far or complete."""

    index: int
    """Its number among the request's continuations."""

    text: str
    """What the tokens decode to. While the request runs, text that may yet change is left out: an incomplete
    character, or the beginning of a stop string."""

    token_ids: list[int]
    """The tokens, with the one that ended the output if it was a stop token."""

    finish_reason: FinishReason | None = None
    """None while the request runs."""

    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None for the model's own end token."""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one clock (``time.monotonic``), and what follows."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from arrival. None before it."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: the mean gap between tokens. None before the end, or for a single token."""
        if self.first_token_time is None or self.finished_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: its prompt and what has been generated for it."""

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids."""

    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
