"""Bodies and answers of /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from jaxllm import SamplingParams
from jaxllm.server.api.protocol.logprobs import AsTokenIds, CompletionLogprobs
from jaxllm.server.api.protocol.option_fields import OptionFields
from jaxllm.server.api.protocol.sampling import (
    MAX_TOP_LOGPROBS,
    ChunkOptions,
    Only,
    ReturnTokenIds,
    SamplingFields,
    check_unicode,
    contradiction,
)
from jaxllm.server.api.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048  # and choices of all of them

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of any of the four forms."""
    if isinstance(value, str) or _is_token_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "it must be a text, a list of texts, token ids, or a list of lists of such")
    if len(value) > MAX_PROMPTS:
        message = "there are {given} prompts; a request may have {limit}"
        raise PydanticCustomError("prompt", message, {"given": len(value), "limit": MAX_PROMPTS})
    are_texts = isinstance(value[0], str)
    for number, prompt in enumerate(value):
        if not (isinstance(prompt, str) if are_texts else _is_token_ids(prompt) or prompt == []):
            kind = "a text" if are_texts else "a list of token ids, which are integers"
            like = ", like those before it" if number else ""
            raise PydanticCustomError(
                "prompt", "number {number} is not {kind}{like}", {"number": number, "kind": kind, "like": like}
            )
    return [check_unicode(prompt) for prompt in value] if are_texts else value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    Any,
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class CompletionRequest(SamplingFields, OptionFields):
    """The body of /v1/completions. With several prompts, the choices of the first come first."""

    prompt: Prompts
    max_tokens: Annotated[
        int | None, Field(ge=1, le=2**31 - 1, description="16, if the operator has set no other default.")
    ] = None
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_TOP_LOGPROBS, description="How many of the most likely tokens to show.")
    ] = None
    return_tokens_as_token_ids: AsTokenIds = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Add the tokenizer's own, as <s>, to prompts that are texts. Default: true.")
    ] = None
    echo: Annotated[bool | None, Field(description="Put the prompt before the text; not with logprobs.")] = None
    stream_options: ChunkOptions | None = None
    return_token_ids: ReturnTokenIds = None

    best_of: Annotated[int | None, Field(ge=1, description="Only the value of n: all choices are returned.")] = None
    suffix: Annotated[Any, Only(hint="the model does not fill in")] = None
    response_format: Annotated[Any, Only({"type": "text"}, hint="forced formats are not supported yet")] = None
    prompt_embeds: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _check_fields(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            message = "echo and logprobs cannot go together: the prompt's log-probabilities are not computed"
            raise contradiction("logprobs", message)
        if self.return_tokens_as_token_ids and self.logprobs is None:
            message = "return_tokens_as_token_ids needs logprobs: it says what their tokens are called"
            raise contradiction("return_tokens_as_token_ids", message)
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options", "stream_options needs stream to be true")
        if (num_choices := len(self.prompt) * (self.n or 1)) > MAX_PROMPTS:
            raise contradiction(
                "n",
                f"{len(self.prompt):,} prompts with n = {self.n} make {num_choices:,} choices; a request may have "
                f"{MAX_PROMPTS:,}. Send several requests.",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = f"best_of is {self.best_of}; only the value of n is possible, for no choice is dropped"
            raise contradiction("best_of", message)
        return self

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError where fields contradict."""
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    """The stop token or stop text that ended it."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of /v1/completions, unless it is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
