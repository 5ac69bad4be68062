"""What is known of an answer when it has ended, wherever it was made."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from jaxllm import RequestOutput

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """Its counts and times. None: not known."""

    finish_reason: str | None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        completion, metrics = output.outputs[0], output.metrics
        return cls(
            completion.finish_reason,
            len(output.prompt_token_ids),
            len(completion.token_ids),
            None if metrics is None else metrics.ttft_s,
            None if metrics is None else metrics.tpot_s,
        )


AnswerStream = Generator[str, None, Answer]
"""The text of an answer, piece by piece; closing it stops the answer."""

AnswerTo = Callable[[list[Message]], AnswerStream]
"""Answers a conversation. Raises JaxLLMError."""
