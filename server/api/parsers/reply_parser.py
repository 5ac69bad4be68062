"""From the text of a reply to its parts."""

from collections.abc import Callable
from itertools import groupby

from jaxllm.server.api.parsers.parts import ContentPart, ReasoningPart, ReplyPart, ToolCallArguments, ToolCallStart
from jaxllm.server.api.parsers.text_feed import Reading, TextFeed

Read = Callable[[TextFeed, list[ReplyPart]], Reading[None]]


class PartParser:
    """Runs a coroutine that reads text and puts what it finds in a list."""

    def __init__(self, read: Read) -> None:
        self._feed = TextFeed()
        self._parts: list[ReplyPart] = []
        self._reading = read(self._feed, self._parts)

    def append(self, text: str) -> list[ReplyPart]:
        self._feed.append(text)
        return self._read_on()

    def finish(self) -> list[ReplyPart]:
        self._feed.end()
        return self._read_on()

    def _read_on(self) -> list[ReplyPart]:
        next(self._reading, None)
        parts = self._parts.copy()
        self._parts.clear()
        return parts


class ReplyParser:
    """Takes a reply apart. Where its text is cut into pieces makes no difference to what comes out.

    Text that may yet become a marker or a call is held back, no longer than that. What looks like a call and is none
    comes out as content, as it was written.

    reasoning, tool_calls: None where there is none to be found.
    parallel_tool_calls: if False, the reply ends with its first call.
    """

    def __init__(self, reasoning: Read | None, tool_calls: Read | None, *, parallel_tool_calls: bool = True) -> None:
        self._reasoning = PartParser(reasoning) if reasoning else None
        self._tool_calls = PartParser(tool_calls) if tool_calls else None
        self._parallel_tool_calls = parallel_tool_calls
        self._has_call = False
        self.is_complete = False
        """The rest of the reply is of no interest: the one call that was wanted is there."""

    def append(self, text: str) -> list[ReplyPart]:
        if self._reasoning is None and self._tool_calls is None:
            return [ContentPart(text)] if text else []
        return self._checked(self._tool_calls_in(self._reasoning_in(text)))

    def finish(self) -> list[ReplyPart]:
        """What was held back, when no more text comes."""
        parts = self._tool_calls_in(self._reasoning.finish() if self._reasoning else [])
        return self._checked(parts + (self._tool_calls.finish() if self._tool_calls else []))

    def _reasoning_in(self, text: str) -> list[ReplyPart]:
        return self._reasoning.append(text) if self._reasoning else [ContentPart(text)]

    def _tool_calls_in(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        if self._tool_calls is None:
            return parts
        found: list[ReplyPart] = []
        for part in parts:
            found += self._tool_calls.append(part.text) if isinstance(part, ContentPart) else [part]
        return found

    def _checked(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        parts = _joined(parts)
        if self._parallel_tool_calls:
            return parts
        wanted: list[ReplyPart] = []
        for part in parts:
            self.is_complete |= self._has_call and not isinstance(part, ToolCallArguments)
            self._has_call |= isinstance(part, ToolCallStart)
            wanted += [] if self.is_complete else [part]
        return wanted


def _joined(parts: list[ReplyPart]) -> list[ReplyPart]:
    """Neighbours of a kind as one part, and no empty ones."""
    joined: list[ReplyPart] = []
    for _, group in groupby(parts, type):
        neighbours = list(group)
        text = "".join(part.text for part in neighbours if not isinstance(part, ToolCallStart))
        match neighbours[0]:
            case ToolCallStart():
                joined += neighbours
            case ToolCallArguments(index) if text:
                joined.append(ToolCallArguments(index, text))
            case ContentPart() if text:
                joined.append(ContentPart(text))
            case ReasoningPart() if text:
                joined.append(ReasoningPart(text))
    return joined
