"""The fields of a request that say how its tokens are chosen and when they end; and those that are refused."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from jaxllm import SamplingParams

T = TypeVar("T")

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024  # each; what may be the beginning of one is held back and looked through
MAX_ITEMS = 10_000  # of a list in a body: checks and templates run on the event loop, for all clients
MAX_STOP_TOKEN_IDS = 256
_MAX_INT32, _MIN_INT64, _MAX_UINT64 = 2**31 - 1, -(2**63), 2**64 - 1
_MAX_FIELDS = 100  # of an object with known fields; the largest has 50

Items = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
"""A list of a body; what is wrong with it is told of its first wrong item."""


def check_unicode(text: str) -> str:
    """The text, if it has whole characters only: JSON can spell half of a surrogate pair, which nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = "there is half of a character at index {index}; it must be valid Unicode"
        raise PydanticCustomError("half_character", message, {"index": error.start}) from None
    return text


Text = Annotated[str, AfterValidator(check_unicode)]

Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
]
"""A client's own notes on a request."""


def _stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if value is None or texts == []:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise PydanticCustomError("stop", "it must be a text of at least one character, or a list of such")
    if len(texts) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop", "a request may have {limit} of them", {"limit": MAX_STOP_STRINGS})
    if (longest := max(map(len, texts))) > MAX_STOP_CHARACTERS:
        message = f"one has {longest:,} characters; it may have {MAX_STOP_CHARACTERS:,} characters"
        raise PydanticCustomError("stop", message)
    return [check_unicode(text) for text in texts]


_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
Stop = Annotated[
    Any,
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_TEXT,
                {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ],
            "description": "Texts that end the output.",
        }
    ),
]


class Only:
    """Marks a field that the API knows and this server cannot honour: only values that ask for nothing are taken
    (and None), others are refused. `hint` says why, or what to do; `code` tells programs."""

    def __init__(self, *values: Any, hint: str = "it is not supported yet", code: str | None = None) -> None:
        self._values = values
        self._hint = hint
        self._code = code

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._values, None]}

    def _check(self, value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self._values):
            return value
        shown = " or ".join([*map(json.dumps, self._values), "null"])
        context = {"shown": shown, "hint": self._hint} | ({"code": self._code} if self._code else {})
        raise PydanticCustomError("unsupported_value", "only {shown} is possible; {hint}", context)


def contradiction(param: str, message: str) -> PydanticCustomError:
    """What a validator of a whole model raises: `param` is the field of it that is to blame."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "param": param})


class RequestModel(BaseModel):
    """A body, or a part of one. Fields that are not declared are refused; numbers in quotes are not numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:  # Each unknown one would be an error to be made.
            unknown = next(str(name) for name in value if name not in cls.model_fields)
            raise contradiction(unknown, f"there are {len(value):,} fields, most of which are not supported")
        return value


class SamplingFields(RequestModel):
    """What completions and chat completions have in common, under OpenAI's names, then under vLLM's."""

    model: Annotated[Text | None, Field(description="One of /v1/models; without it the first.")] = None
    stream: bool | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES, description="How many continuations.")] = None
    temperature: Annotated[float | None, Field(ge=0, allow_inf_nan=False, description="0 is greedy.")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=_MIN_INT64, le=_MAX_UINT64)] = None
    stop: Stop = None
    user: Annotated[Text | None, Field(description="The client's own; changes nothing.")] = None

    frequency_penalty: Annotated[Any, Only(0, hint="penalties are not supported yet")] = None
    presence_penalty: Annotated[Any, Only(0, hint="penalties are not supported yet")] = None
    logit_bias: Annotated[Any, Only({})] = None

    top_k: Annotated[int | None, Field(ge=-1, le=_MAX_INT32, description="0 and -1 are off.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[Any, Only(1, hint="penalties are not supported yet")] = None
    min_tokens: Annotated[
        int | None, Field(ge=0, le=_MAX_INT32, description="No end token or stop text before so many tokens.")
    ] = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[
        Annotated[list[Annotated[int, Field(ge=0, le=_MAX_INT32)]], Field(max_length=MAX_STOP_TOKEN_IDS)] | None,
        Field(description="Tokens that end the output."),
    ] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None

    request_id: Annotated[Text | None, Field(description="Changes nothing; X-Request-Id is the header for it.")] = None
    prompt_logprobs: Annotated[Any, Only()] = None
    logits_processors: Annotated[Any, Only([])] = None
    bad_words: Annotated[Any, Only([])] = None
    allowed_token_ids: Annotated[Any, Only()] = None
    structured_outputs: Annotated[Any, Only(hint="forced formats are not supported yet")] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    thinking_token_budget: Annotated[Any, Only()] = None
    truncate_prompt_tokens: Annotated[Any, Only()] = None
    kv_transfer_params: Annotated[Any, Only({})] = None
    vllm_xargs: Annotated[Any, Only({})] = None

    def sampling_params(self, **options: Any) -> SamplingParams:
        """`options` are those that have other names, or other values, than the fields here. Raises
        InvalidRequestError where fields contradict."""
        given = {name: getattr(self, name) for name in _SAME_NAMES}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None} | options)


_SAME_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


ReturnTokenIds = Annotated[bool | None, Field(description="Show the token ids of the prompt and of the answer.")]


class StreamOptions(RequestModel):
    """What a stream shows beside the answer."""

    include_usage: Annotated[bool | None, Field(description="A last chunk with the numbers of tokens.")] = None
    include_obfuscation: Annotated[Any, Only(False, hint="chunks are not padded")] = None


class ChunkOptions(StreamOptions):
    """The same for a stream of chunks, with what vLLM has beside OpenAI."""

    continuous_usage_stats: Annotated[
        bool | None, Field(description="Each chunk has the tokens of its choice so far. Needs include_usage.")
    ] = None

    @model_validator(mode="after")
    def _check_usage(self) -> "ChunkOptions":
        if self.continuous_usage_stats and not self.include_usage:
            message = "continuous_usage_stats needs include_usage to be true; without it no chunk has usage"
            raise contradiction("continuous_usage_stats", message)
        return self
