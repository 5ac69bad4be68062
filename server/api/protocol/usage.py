"""How many tokens an answer took."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from jaxllm.server.api.generation.generation import Generation


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    """Those whose keys and values were found in the prefix cache."""


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


def usage_so_far(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Of one choice, in the middle of its stream."""
    total = num_prompt_tokens + num_output_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens, "total_tokens": total}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(cls, generations: "Sequence[Generation]", *, num_reasoning_tokens: int | None = None) -> "Usage":
        """A prompt counts once, however many choices it has.

        num_reasoning_tokens: None where reasoning is not told from the answer.
        """
        num_prompt = sum(generation.num_prompt_tokens for generation in generations)
        num_output = sum(generation.num_output_tokens for generation in generations)
        usage = cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(generation.num_cached_tokens for generation in generations)
            ),
        )
        if num_reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens)
        return usage
