"""The items of a conversation in bodies of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from jaxllm import Conversation
from jaxllm.server.api.protocol.sampling import Items, Only, RequestModel, Text
from jaxllm.server.api.protocol.text_content import TextContent

Content = Annotated[
    str, TextContent("input_text", "output_text", "text", ignored=("annotations", "logprobs", "parsed"))
]
Status = Annotated[
    Literal["in_progress", "completed", "incomplete"] | None, Field(description="As it came; changes nothing.")
]


class _Item(RequestModel):
    """Items that this API gave may be sent back as they came."""

    id: Annotated[Text | None, Field(description="As it came; changes nothing.")] = None
    status: Status = None

    def add_to(self, conversation: Conversation) -> None:
        """Raises ValueError for what does not fit the conversation."""
        raise NotImplementedError


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Annotated[Any, Only()] = None

    def add_to(self, conversation: Conversation) -> None:
        if self.role == "assistant":
            conversation.answer(self.content)
        else:
            conversation.say("user" if self.role == "user" else "system", self.content)


class FunctionCallItem(_Item):
    model_config = ConfigDict(populate_by_name=True)  # "async" is "async_" in what OpenAI's client dumps

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Annotated[Text, Field(description="A JSON object; one that a model got wrong may be sent back.")]
    parsed_arguments: Annotated[Any, Field(description="As OpenAI's client adds it; changes nothing.")] = None
    namespace: Annotated[Any, Only()] = None
    caller: Annotated[Any, Only()] = None
    async_: Annotated[Any, Only(False), Field(alias="async")] = None

    def add_to(self, conversation: Conversation) -> None:
        conversation.call(self.call_id, self.name, self.arguments)


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    name: Annotated[Text | None, Field(description="Changes nothing: a result has the name of its call.")] = None
    namespace: Annotated[Any, Only()] = None
    caller: Annotated[Any, Only()] = None

    def add_to(self, conversation: Conversation) -> None:
        conversation.result(self.call_id, self.output)


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[str | None, TextContent("summary_text"), Field(description="Changes nothing.")] = None
    content: Annotated[str | None, TextContent("reasoning_text")] = None
    encrypted_content: Annotated[Any, Only(hint="reasoning is sent as text")] = None

    def add_to(self, conversation: Conversation) -> None:
        if self.content:
            conversation.think(self.content)


def _type_of_item(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return f"={kind}"


# A tag begins with "=" to be told from a field's name where an error names its place.
Item = Annotated[
    Annotated[MessageItem, Tag("=message")]
    | Annotated[FunctionCallItem, Tag("=function_call")]
    | Annotated[FunctionCallOutputItem, Tag("=function_call_output")]
    | Annotated[ReasoningItem, Tag("=reasoning")],
    Discriminator(
        _type_of_item,
        custom_error_type="item_type",
        custom_error_message="an item's type must be message, function_call, function_call_output or reasoning",
    ),
]
Input = Annotated[
    Annotated[Text, Tag("=text")] | Annotated[Items[Item], Field(min_length=1), Tag("=items")],
    Discriminator(lambda value: "=text" if isinstance(value, str) else "=items"),
]
