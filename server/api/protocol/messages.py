"""Bodies and answers of /v1/messages, as Anthropic's clients speak."""

from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from jaxllm import Conversation, SamplingParams
from jaxllm.server.api.protocol.function_tool import Strict, function_for_template
from jaxllm.server.api.protocol.message_blocks import CacheControl, Message, Texts, Turn
from jaxllm.server.api.protocol.option_fields import OptionFields
from jaxllm.server.api.protocol.sampling import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Items,
    Only,
    RequestModel,
    Text,
    contradiction,
)


class Tool(RequestModel):
    type: Annotated[Any, Only("custom", hint="only tools of the client's own are supported")] = None
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], Field(description="A JSON schema.")]
    cache_control: CacheControl = None
    eager_input_streaming: Annotated[bool | None, Field(description="Changes nothing: inputs always are.")] = None
    strict: Strict = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    input_examples: Annotated[Any, Only([])] = None

    def for_template(self) -> dict[str, Any]:
        return function_for_template(self.name, self.description, self.input_schema)


class ToolChoice(RequestModel):
    type: Annotated[Literal["auto", "none"], Field(description="A call cannot be forced yet.")]
    disable_parallel_tool_use: Annotated[
        bool | None, Field(description="true: the answer ends with its first call.")
    ] = None


class Thinking(RequestModel):
    """Whether the model thinks, where its chat template leaves that open (`enable_thinking`)."""

    type: Annotated[Literal["adaptive", "disabled"], Field(description="Thinking cannot be kept to a budget.")]
    display: Annotated[Any, Only("summarized", hint="thinking is given in full")] = None
    budget_tokens: Annotated[Any, Only(hint="thinking cannot be kept to a budget")] = None
    block_binding: Annotated[Any, Only({}, hint="thinking is not signed")] = None


class OutputConfig(RequestModel):
    effort: Annotated[
        Text | None, Field(description="`reasoning_effort` of the chat template; refused if it has none of this name.")
    ] = None
    format: Annotated[Any, Only(hint="forced formats are not supported yet")] = None
    task_budget: Annotated[Any, Only(hint="see max_tokens")] = None


class Metadata(RequestModel):
    user_id: Annotated[Text | None, Field(description="The client's own; changes nothing.")] = None


class CountTokensRequest(RequestModel):
    """The body of /v1/messages/count_tokens."""

    model: Annotated[Text, Field(description="One of /v1/models.")]
    messages: Annotated[Items[Message], Field(min_length=1)]
    system: Texts | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="Variables of the chat template.")] = None
    cache_control: CacheControl = None

    speed: Annotated[Any, Only("standard", hint="there is one speed; see priority")] = None
    billing_policy: Annotated[Any, Only({"type": "billing_policy", "bill_to": "self"}, hint="nobody is billed")] = None
    compaction: Annotated[Any, Only(hint="shorten the conversation yourself")] = None
    context_management: Annotated[Any, Only({}, {"edits": []}, hint="shorten the conversation yourself")] = None
    mcp_servers: Annotated[Any, Only([], hint="only tools of the client's own are supported")] = None
    user_profile_id: Annotated[Any, Only(hint="see metadata.user_id")] = None
    workspace_id: Annotated[Any, Only(hint="there are no workspaces; see API keys and tenants")] = None

    @model_validator(mode="after")
    def _check_fields(self) -> "CountTokensRequest":
        if self.messages[-1].role == "assistant":
            message = "the last message is the assistant's; answers cannot be begun for the model yet"
            raise contradiction(f"messages[{len(self.messages) - 1}]", message)
        if not self.tools and self.tool_choice is not None and self.tool_choice.type != "none":
            raise contradiction("tool_choice", "tool_choice needs tools, of which one could be called")
        return self

    @property
    def param_names(self) -> dict[str, str]:
        """What this body calls what an error blames, where that is not its name in `SamplingParams`."""
        names = {"prompt": "messages", "stop": "stop_sequences"}
        if self.output_config is not None and self.output_config.effort is not None:
            names["chat_template_kwargs.reasoning_effort"] = "output_config.effort"
        return names

    @property
    def may_call_tools(self) -> bool:
        """Whether the model is told of tools, and its text searched for calls."""
        return bool(self.tools) and (self.tool_choice is None or self.tool_choice.type != "none")

    @property
    def parallel_tool_calls(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    def tools_for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools or ()] if self.may_call_tools else []

    def messages_for_template(self) -> list[dict[str, Any]]:
        """Messages of one role in a row are one turn. Raises ValueError naming the message that does not fit."""
        conversation = Conversation()
        if self.system:
            conversation.say("system", self.system)
        for role, messages in groupby(enumerate(self.messages), key=lambda numbered: numbered[1].role):
            turn = Turn(conversation, role)
            for number, message in messages:
                try:
                    for block in message.blocks:
                        turn.add(block)
                except ValueError as error:
                    raise ValueError(f"messages[{number}]: {error}") from error
            turn.end_text()
        return conversation.messages

    def template_kwargs(self) -> dict[str, Any]:
        """The further variables of the chat template, but for `enable_thinking`."""
        effort = self.output_config.effort if self.output_config else None
        return ({} if effort is None else {"reasoning_effort": effort}) | (self.chat_template_kwargs or {})


class MessagesRequest(OptionFields, CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]] | None,
        Field(max_length=MAX_STOP_STRINGS),
    ] = None
    temperature: Annotated[float | None, Field(ge=0, allow_inf_nan=False, description="0 is greedy.")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31 - 1, description="0 and -1 are off.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64 - 1)] = None
    metadata: Metadata | None = None

    service_tier: Annotated[Any, Only("auto", "standard_only", hint="there are no tiers; see priority")] = None
    thread: Annotated[
        Any, Only(hint="messages are not kept; send the whole conversation", code="thread_unsupported_request")
    ] = None
    container: Annotated[Any, Only(hint="there are no built-in tools")] = None
    fallbacks: Annotated[Any, Only([], "default", hint="one model is served")] = None
    fallback_credit_token: Annotated[Any, Only(hint="nobody is billed")] = None
    inference_geo: Annotated[Any, Only(hint="the server runs where it runs")] = None
    diagnostics: Annotated[Any, Only(hint="see cache_read_input_tokens of the answer's usage")] = None

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError where fields contradict."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
        given["stop"] = self.stop_sequences
        return SamplingParams(
            max_tokens=self.max_tokens, **{name: value for name, value in given.items() if value is not None}
        )


class TokensCount(BaseModel):
    input_tokens: int


class AnsweredText(BaseModel):
    type: Literal["text"]
    text: str
    citations: None


class AnsweredThinking(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Empty: thinking is not signed."""


class AnsweredToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    """{"INVALID_JSON": text} if the model wrote no JSON object."""


class MessagesUsage(BaseModel):
    input_tokens: int
    """Those that were not found in the prefix cache."""

    cache_read_input_tokens: int
    """Those that were."""

    cache_creation_input_tokens: int
    output_tokens: int


class AnsweredMessage(BaseModel):
    """The answer of /v1/messages, unless it is streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    stop_details: None
    usage: MessagesUsage
