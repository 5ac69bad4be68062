"""What is said in /v1/messages: messages, and the blocks that they are made of."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from jaxllm import Conversation
from jaxllm.server.api.protocol.sampling import Items, Only, RequestModel, Text, contradiction
from jaxllm.server.api.protocol.text_content import TextContent

Texts = Annotated[str, TextContent("text", ignored=("cache_control",))]
CacheControl = Annotated[Any, Field(description="Changes nothing: prefixes are always cached.")]


class _Block(RequestModel):
    cache_control: CacheControl = None


class TextBlock(_Block):
    type: Literal["text"]
    text: Text
    citations: Annotated[Any, Only([])] = None
    parsed_output: Annotated[Any, Field(description="What a client has read in the text; changes nothing.")] = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: Text
    signature: Annotated[Text | None, Field(description="As it came; changes nothing.")] = None


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Annotated[Any, Only({"type": "direct"})] = None
    toolset_name: Annotated[Any, Only()] = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = ""
    is_error: Annotated[bool | None, Field(description='true: the model reads "Error: " before the content.')] = None
    toolset_name: Annotated[Any, Only()] = None


# A tag begins with "=" to be told from a field's name where an error names its place.
Block = Annotated[
    Annotated[TextBlock, Tag("=text")]
    | Annotated[ThinkingBlock, Tag("=thinking")]
    | Annotated[ToolUseBlock, Tag("=tool_use")]
    | Annotated[ToolResultBlock, Tag("=tool_result")],
    Discriminator(
        lambda block: f"={block.get('type') if isinstance(block, dict) else getattr(block, 'type', None)}",
        custom_error_type="block_type",
        custom_error_message="only blocks of the types text, thinking, tool_use and tool_result can be read",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("=text")] | Annotated[Items[Block], Field(min_length=1), Tag("=blocks")],
    Discriminator(lambda value: "=text" if isinstance(value, str) else "=blocks"),
]
_BLOCKS_OF_ROLES: dict[str, tuple[type[_Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class Message(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Content
    output_config: Annotated[Any, Only({}, hint="it is for the whole request")] = None

    @model_validator(mode="after")
    def _check_blocks(self) -> "Message":
        for number, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if not isinstance(block, _BLOCKS_OF_ROLES[self.role]):
                message = f"content[{number}] is a {block.type} block, which the role {self.role} cannot have"
                raise contradiction(f"content[{number}]", message)
        return self

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Turn:
    """What one role says, in one message or several in a row: their blocks, one after the other."""

    def __init__(self, conversation: Conversation, role: str) -> None:
        self._conversation = conversation
        self._role = role
        self._texts: list[str] = []

    def add(self, block: Block) -> None:
        """Raises ValueError for the result of a call that is not there."""
        if isinstance(block, TextBlock):
            self._texts.append(block.text)
            return
        self.end_text()
        match block:
            case ThinkingBlock():
                self._conversation.think(block.thinking)
            case ToolUseBlock():
                self._conversation.call(block.id, block.name, block.input)
            case ToolResultBlock():
                text = ("Error: " if block.is_error else "") + block.content
                self._conversation.result(block.tool_use_id, text)

    def end_text(self) -> None:
        """Texts in a row are one, with a newline between them."""
        if self._texts and self._role == "assistant":
            self._conversation.answer("\n".join(self._texts))
        elif self._texts:
            self._conversation.say(self._role, "\n".join(self._texts))
        self._texts.clear()
