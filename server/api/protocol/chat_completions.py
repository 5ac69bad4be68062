"""Bodies and answers of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from jaxllm import SamplingParams
from jaxllm.server.api.protocol.function_tool import Strict, function_for_template
from jaxllm.server.api.protocol.logprobs import AsTokenIds, ChatLogprobs
from jaxllm.server.api.protocol.option_fields import OptionFields
from jaxllm.server.api.protocol.sampling import (
    MAX_TOP_LOGPROBS,
    ChunkOptions,
    Items,
    Metadata,
    Only,
    RequestModel,
    ReturnTokenIds,
    SamplingFields,
    Text,
    contradiction,
)
from jaxllm.server.api.protocol.template_fields import TemplateFields
from jaxllm.server.api.protocol.text_content import TextContent
from jaxllm.server.api.protocol.usage import Usage


class CalledFunction(RequestModel):
    name: Text
    arguments: Annotated[
        Text | dict[str, Any] | None,
        Field(description="A JSON object, as text or not; one that a model got wrong may be sent back."),
    ] = None
    parsed_arguments: Annotated[Any, Field(description="As OpenAI's client adds it; changes nothing.")] = None


class ToolCall(RequestModel):
    id: Text
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[Any, Field(description="As it came in a stream; changes nothing.")] = None


class Message(RequestModel):
    """What somebody said. `content` is a text, or a list of text parts, which are joined by newlines."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, TextContent("text")] = None
    name: Text | None = None
    tool_calls: Annotated[Items[ToolCall] | None, Field(description="Of the role assistant.")] = None
    tool_call_id: Annotated[Text | None, Field(description="Of the role tool: the call that this answers.")] = None
    reasoning_content: Annotated[Text | None, Field(description="Of the role assistant.")] = None
    reasoning: Annotated[Text | None, Field(description="The same, as vLLM calls it.")] = None

    # What answers of this API may carry, so that they can be sent back as they came.
    refusal: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(hint="use tool_calls")] = None
    parsed: Annotated[Any, Field(description="As OpenAI's client adds it; changes nothing.")] = None

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        is_assistant, is_tool = self.role == "assistant", self.role == "tool"
        for name, has_place in (
            ("tool_calls", is_assistant),
            ("reasoning_content", is_assistant),
            ("reasoning", is_assistant),
            ("tool_call_id", is_tool),
        ):
            if getattr(self, name) is not None and not has_place:
                raise contradiction(name, f"a message of the role {self.role} has no {name}")
        if is_tool and self.tool_call_id is None:
            raise contradiction("tool_call_id", "a message of the role tool needs tool_call_id")
        if self.content is None and not is_assistant:
            raise contradiction("content", "content is missing")
        return self


class Function(RequestModel):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="A JSON schema.")] = None
    strict: Strict = None


class Tool(RequestModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return function_for_template(self.function.name, self.function.description, self.function.parameters)


class ChatRequest(SamplingFields, OptionFields, TemplateFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[
        int | None,
        Field(ge=1, le=2**31 - 1, description="The default fills the context, if the operator sets no other."),
    ] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1, description="The older name.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    return_tokens_as_token_ids: AsTokenIds = None
    stream_options: ChunkOptions | None = None
    return_token_ids: ReturnTokenIds = None
    tools: Items[Tool] | None = None
    tool_choice: Annotated[
        Any, Only("none", "auto", hint="a call cannot be forced yet"), Field(description="auto needs tools.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Needs tools. false: the answer ends with its first call.")
    ] = None
    include_reasoning: Annotated[
        bool | None, Field(description="false leaves out the reasoning that is told from the answer.")
    ] = None
    reasoning_effort: Annotated[
        Text | None, Field(description="A variable of the chat template; refused if it has none of this name.")
    ] = None
    chat_template: Annotated[Text | None, Field(description="If the operator allows it.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables of the chat template, as enable_thinking.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Add the tokenizer's own to those of the template. Default: false.")
    ] = None
    metadata: Annotated[Metadata | None, Field(description="The client's own; changes nothing.")] = None
    safety_identifier: Annotated[Text | None, Field(description="The client's own; changes nothing.")] = None
    prompt_cache_key: Annotated[
        Text | None, Field(description="Changes nothing: prefixes are shared by content; see cache_salt.")
    ] = None

    response_format: Annotated[Any, Only({"type": "text"}, hint="forced formats are not supported yet")] = None
    echo: Annotated[Any, Only(False)] = None
    documents: Annotated[Any, Only([], hint="give them to the template by chat_template_kwargs")] = None
    mm_processor_kwargs: Annotated[Any, Only({}, hint="requests are texts")] = None
    media_io_kwargs: Annotated[Any, Only({}, hint="requests are texts")] = None
    modalities: Annotated[Any, Only(["text"], hint="answers are texts")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    store: Annotated[Any, Only(False, hint="chat completions are not stored")] = None
    service_tier: Annotated[Any, Only("auto", "default", hint="there are no tiers; see priority")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only(hint="answers are texts")] = None
    web_search_options: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only(hint="use tools")] = None
    function_call: Annotated[Any, Only("none", "auto", hint="use tool_choice")] = None

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise contradiction("top_logprobs", "top_logprobs needs logprobs to be true")
        if self.return_tokens_as_token_ids and not self.logprobs:
            message = "return_tokens_as_token_ids needs logprobs to be true: it says what their tokens are called"
            raise contradiction("return_tokens_as_token_ids", message)
        if self.include_reasoning is False:
            for name in ("logprobs", "return_token_ids"):
                if getattr(self, name):
                    message = f"{name} would show the tokens of the reasoning, which include_reasoning leaves out"
                    raise contradiction("include_reasoning", message)
        if self.stream_options is not None and not self.stream:
            raise contradiction("stream_options", "stream_options needs stream to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise contradiction(
                "max_tokens",
                f"max_tokens is {self.max_tokens:,} and max_completion_tokens {self.max_completion_tokens:,}, which "
                "is its newer name; leave one out",
            )
        if not self.tools:
            if self.tool_choice not in (None, "none"):
                raise contradiction("tool_choice", "tool_choice needs tools, of which one could be called")
            if self.parallel_tool_calls is not None:
                raise contradiction("parallel_tool_calls", "parallel_tool_calls needs tools, which could be called")
        return self

    @property
    def param_names(self) -> dict[str, str]:
        """What this body calls what an error blames, where that is not its name in `SamplingParams`."""
        names = {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.reasoning_effort is not None:
            names["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
        return names

    @property
    def may_call_tools(self) -> bool:
        """Whether the model is told of tools, and its text searched for calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def template_kwargs(self) -> dict[str, Any]:
        """The further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError where fields contradict."""
        return self.sampling_params(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class AnsweredFunction(BaseModel):
    name: str
    arguments: str


class AnsweredToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM calls it."""
    tool_calls: list[AnsweredToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    """The stop token or stop text that ended it."""
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions, unless it is streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
