"""What a model's reply is made of, in the order in which it comes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its arguments follow, all of them before the next call begins.

    index: its number among the reply's calls, from 0.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments: JSON as the model wrote it, so not certainly valid JSON."""

    index: int
    text: str


ReplyPart = ContentPart | ReasoningPart | ToolCallStart | ToolCallArguments
