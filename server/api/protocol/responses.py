"""Bodies and answers of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from jaxllm import Conversation, SamplingParams
from jaxllm.server.api.json_body import encode_json
from jaxllm.server.api.protocol.function_tool import Strict, function_for_template
from jaxllm.server.api.protocol.option_fields import OptionFields
from jaxllm.server.api.protocol.response_items import Input
from jaxllm.server.api.protocol.sampling import (
    Items,
    Metadata,
    Only,
    RequestModel,
    SamplingFields,
    StreamOptions,
    Text,
    contradiction,
)


def _check_json(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """It comes back with the response, so that it must be possible to write it."""
    try:
        encode_json(value)
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"it cannot be given back with the response: {error}") from error
    return value


class FunctionTool(RequestModel):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["function"]
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_check_json), Field(description="A JSON schema.")] = (
        None
    )
    strict: Strict = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    output_schema: Annotated[Any, Only()] = None
    async_: Annotated[Any, Only(False), Field(alias="async")] = None

    def for_template(self) -> dict[str, Any]:
        return function_for_template(self.name, self.description, self.parameters)


class Reasoning(RequestModel):
    effort: Annotated[
        Text | None, Field(description="`reasoning_effort` of the chat template; refused if it has none of this name.")
    ] = None
    summary: Annotated[Any, Only(hint="reasoning is given in full")] = None
    generate_summary: Annotated[Any, Only(hint="reasoning is given in full")] = None
    context: Annotated[Any, Only("auto")] = None
    mode: Annotated[Any, Only("standard")] = None


class TextFormat(RequestModel):
    format: Annotated[Any, Only({"type": "text"}, hint="forced formats are not supported yet")] = None
    verbosity: Annotated[Any, Only("medium")] = None


class InputTokensRequest(RequestModel):
    """The body of POST /v1/responses/input_tokens."""

    model: Annotated[Text | None, Field(description="One of /v1/models; without it the first.")] = None
    input: Input | None = None
    instructions: Annotated[
        Text | None, Field(description="A system message of this request only: it is not kept for later ones.")
    ] = None
    previous_response_id: Annotated[Text | None, Field(description="The conversation that this continues.")] = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Annotated[
        Any,
        Only("none", "auto", hint="a call cannot be forced yet"),
        Field(description="Without tools it only comes back with the response."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        Field(description="false: the answer ends with its first call. Without tools it comes back with the response."),
    ] = None
    reasoning: Reasoning | None = None
    text: TextFormat | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables of the chat template, as enable_thinking.")
    ] = None

    truncation: Annotated[Any, Only("disabled", hint="a conversation that is too long is refused")] = None
    conversation: Annotated[Any, Only(hint="use previous_response_id")] = None
    personality: Annotated[Any, Only()] = None

    @property
    def param_names(self) -> dict[str, str]:
        """What this body calls what an error blames, where that is not its name in `SamplingParams`."""
        names = {"prompt": "input", "max_tokens": "max_output_tokens"}
        if self.reasoning is not None and self.reasoning.effort is not None:
            names["chat_template_kwargs.reasoning_effort"] = "reasoning.effort"
        return names

    @property
    def may_call_tools(self) -> bool:
        """Whether the model is told of tools, and its text searched for calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def tools_for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools or ()] if self.may_call_tools else []

    def add_to(self, conversation: Conversation) -> None:
        """Appends the input. Raises ValueError naming the item that does not fit."""
        if self.input is None:
            return None
        if isinstance(self.input, str):
            return conversation.say("user", self.input)
        for number, item in enumerate(self.input):
            try:
                item.add_to(conversation)
            except ValueError as error:
                raise ValueError(f"input[{number}]: {error}") from error
        return None

    def template_kwargs(self) -> dict[str, Any]:
        """The further variables of the chat template."""
        effort = self.reasoning.effort if self.reasoning else None
        return ({} if effort is None else {"reasoning_effort": effort}) | (self.chat_template_kwargs or {})


class ResponseRequest(SamplingFields, OptionFields, InputTokensRequest):
    """The body of POST /v1/responses."""

    input: Input
    store: Annotated[
        bool | None, Field(description="Keep the response for previous_response_id. Default: true, where any are kept.")
    ] = None
    background: Annotated[
        bool | None, Field(description="Answer at once; ask for the response, or cancel it, by its id.")
    ] = None
    max_output_tokens: Annotated[
        int | None,
        Field(ge=1, le=2**31 - 1, description="The default fills the context, if the operator sets no other."),
    ] = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[Metadata | None, Field(description="The client's own; comes back with the response.")] = None
    safety_identifier: Annotated[Text | None, Field(description="The client's own; changes nothing.")] = None
    prompt_cache_key: Annotated[
        Text | None, Field(description="Changes nothing: prefixes are shared by content; see cache_salt.")
    ] = None

    n: Annotated[Any, Only(1, hint="a response is one answer")] = None
    include: Annotated[Any, Only([], hint="nothing more can be included")] = None
    top_logprobs: Annotated[Any, Only(0, hint="use /v1/chat/completions for log-probabilities")] = None
    service_tier: Annotated[Any, Only("auto", "default", hint="there are no tiers; see priority")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only(hint="prompts are not stored")] = None
    context_management: Annotated[Any, Only()] = None
    max_tool_calls: Annotated[Any, Only(hint="there are no built-in tools")] = None
    background_options: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    image: Annotated[Any, Only()] = None
    access_programs: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _check_fields(self) -> "ResponseRequest":
        if self.background and self.stream:
            raise contradiction("background", "background is true and stream is true; a response is one or the other")
        if self.background and self.store is False:
            message = "background is true and store is false; a response that is not kept cannot be asked for"
            raise contradiction("store", message)
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options", "stream_options needs stream to be true")
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            message = "stream_options has include_usage; the last event of a response always has the usage"
            raise contradiction("stream_options.include_usage", message)
        return self

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError where fields contradict."""
        return self.sampling_params(max_tokens=self.max_output_tokens, logprobs=None)


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class InputTokensDetails(BaseModel):
    cached_tokens: int
    """Those whose keys and values were found in the prefix cache."""

    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int
    """Tokens of the reasoning's text, without the markers around it."""


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The answer of POST and GET /v1/responses, unless it is streamed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputFunctionCall | OutputReasoning]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    background: bool
    store: bool
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: Literal["disabled"]
    service_tier: Literal["default"]
    metadata: dict[str, str]
    user: str | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]
