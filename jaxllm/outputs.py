"""What a request gives back: whole (`RequestOutput`, under vLLM's names) or piece by piece (`OutputDelta`)."""

from collections.abc import Sequence
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

    @classmethod
    def of(cls, deltas: "Sequence[OutputDelta]") -> "CompletionOutput":
        """What the deltas of one continuation, in order and at least one, are together."""
        whole = OutputDelta.joined(deltas)
        return cls(
            index=whole.index,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            logprobs=whole.logprobs,
            error=whole.error,
        )


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

    @classmethod
    def joint(cls, metrics: "Sequence[RequestMetrics]") -> "RequestMetrics":
        """Of several continuations: when the first began, when the last ended, and the tokens of all."""
        if len(metrics) == 1:
            return metrics[0]
        first_scheduled = [m.first_scheduled_time for m in metrics if m.first_scheduled_time is not None]
        first_token = [m.first_token_time for m in metrics if m.first_token_time is not None]
        return cls(
            arrival_time=metrics[0].arrival_time,
            first_scheduled_time=min(first_scheduled, default=None),
            first_token_time=min(first_token, default=None),
            finished_time=max(m.finished_time or 0.0 for m in metrics),
            num_output_tokens=sum(m.num_output_tokens for m in metrics),
            num_cached_tokens=metrics[0].num_cached_tokens,
        )


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

    @classmethod
    def joined(cls, deltas: "Sequence[OutputDelta]") -> "OutputDelta":
        """One for several of a continuation, in order and at least one."""
        if len(deltas) == 1:
            return deltas[0]
        last, logprobs = deltas[-1], None
        if any(delta.logprobs is not None for delta in deltas):
            logprobs = [token for delta in deltas for token in delta.logprobs or ()]
        return cls(
            index=last.index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            metrics=last.metrics,
            error=last.error,
        )


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
