"""What a request gives back: whole (`RequestOutput`, under vLLM's names) or piece by piece (`OutputDelta`)."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(slots=True)
class TokenLogprobs:
    """How likely one token of an output was, by the model's own logits: before temperature and filters.

    Natural logarithms, computed in float32.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The most likely tokens at its place, best first, as many as `SamplingParams.logprobs` asked for."""


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

    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if they were asked for."""

    error: str | None = None
    """What went wrong, with the finish_reason "error"."""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one clock (``time.monotonic``), and what follows."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were found in the prefix cache."""

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
class OutputDelta:
    """What is new of one continuation. The deltas of an `index`, joined, are its `CompletionOutput`.

    A delta may hold several tokens, for they merge while nobody reads them.
    """

    index: int
    """Which continuation, from 0 to `SamplingParams.n` - 1."""

    text: str
    """Never splits a character, never shows the beginning of a stop string. Empty while such is held back."""

    token_ids: list[int]
    """The new tokens. Their text may come in a later delta."""

    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if they were asked for."""

    finish_reason: FinishReason | None = None
    """Set in the last delta of this index."""

    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None for the model's own end token."""

    metrics: RequestMetrics | None = None
    """In the last delta of this index."""

    error: str | None = None
    """What went wrong, with the finish_reason "error"."""


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
    """Of several continuations: when the first began, when the last ended, and the tokens of all."""
