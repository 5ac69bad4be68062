"""Reads what the formats of tool calls have in common: plain text, and calls as JSON objects."""

import json
from collections.abc import Callable

from jaxllm.server.api.parsers.parts import ContentPart, ReplyPart, ToolCallArguments, ToolCallStart
from jaxllm.server.api.parsers.text_feed import Reading, TextFeed

_ARGUMENTS_KEYS = ("arguments", "parameters")
_HARMLESS_KEYS = ("id", "type")


class CallReader:
    """What a format's `read` coroutine works with.

    parts: where it puts what it finds.
    make_id: makes the ids of calls.
    closing: markers that end a call even where its JSON is not complete. One inside a JSON string is text, unless
        it begins a line: a JSON string has no line breaks, so there the model has forgotten a quote.
    """

    def __init__(
        self, feed: TextFeed, parts: list[ReplyPart], make_id: Callable[[], str], *, closing: tuple[str, ...] = ()
    ) -> None:
        self.feed = feed
        self._parts = parts
        self._make_id = make_id
        self._closing = closing
        self._num_calls = 0
        self._is_after_call = False
        self._space = ""  # before the marker that was read last

    def content(self, text: str) -> None:
        if text:
            self._parts.append(ContentPart(text))
            self._is_after_call = False

    def content_before(self, *markers: str) -> Reading[str | None]:
        """Passes text on as content and reads the first marker; None at the end. Space beside calls is dropped."""
        self._space, marker = yield from self.feed.pass_on(markers, self.content)
        if marker is None and not self._is_after_call:
            self.content(self._space)
        return marker

    def give_back(self) -> None:
        """What was read since the mark is no call: it becomes content, with the space before it.

        Space alone is put back, because what it is depends on what follows.
        """
        text = self.feed.take_marked()
        if text.strip():
            self.content(self._space + text)
            self._space = ""
        else:
            self.feed.unread(text)

    def start_call(self, name: str) -> None:
        self.feed.take_marked()
        self._space = ""
        self._parts.append(ToolCallStart(self._num_calls, self._make_id(), name))
        self._num_calls += 1
        self._is_after_call = True

    def arguments(self, text: str) -> None:
        self._parts.append(ToolCallArguments(self._num_calls - 1, text))

    def call_object(self, *, strictly: bool = False) -> Reading[bool]:
        """Reads `{"name": …, "arguments": …}`, where "parameters" is as good as "arguments".

        Returns False if there is no call; what was read is then still marked. With the beginning of its arguments
        a call is a call, however it goes on.

        strictly: to tell calls from other JSON, refuses keys that calls do not have, and calls without arguments.
        """
        name = arguments = None
        has_started = False
        if not (yield from self.feed.take("{")):
            return False
        while True:
            if has_started:
                self.feed.mark()
            yield from self.feed.skip_space()
            if (yield from self.feed.take(",")):
                yield from self.feed.skip_space()
            if (yield from self.feed.take("}")):
                break
            key = yield from self._string()
            yield from self.feed.skip_space()
            if key is None or not (yield from self.feed.take(":")):
                return self._cut_off(has_started)
            yield from self.feed.skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                if not name:
                    return False
            elif key in _ARGUMENTS_KEYS and arguments is None and not has_started:
                if name is not None and (yield from self.feed.is_at("{")):
                    self.start_call(name)
                    has_started = True
                    if not (yield from self.value(self.arguments)):
                        return True
                else:
                    arguments = yield from self._arguments()
                    if arguments is None:
                        return False
            elif strictly and not has_started and key not in _HARMLESS_KEYS:
                return False
            elif not (yield from self.value(lambda _: None)):
                return self._cut_off(has_started)
        if has_started:
            self.feed.take_marked()
        elif name is None or (strictly and arguments is None):
            return False
        else:
            self.start_call(name)
            self.arguments(arguments or "{}")
        return True

    def _cut_off(self, has_started: bool) -> bool:
        if has_started:
            self.give_back()
        return has_started

    def value(self, show: Callable[[str], None], *, ends_with_line: bool = False) -> Reading[bool]:
        """Reads a JSON value and shows it as it comes. Returns False if it is cut off."""
        first = yield from self.feed.peek()
        if first not in ("{", "[", '"'):
            return (yield from self._word(show))
        depth, in_string, char = 0, False, ""
        while True:
            if (not in_string or char == "\n") and (yield from self._is_closing()):
                return False
            char = yield from self.feed.next()
            if not char:
                return False
            show(char)
            if char == "\n" and ends_with_line:
                return False
            if in_string and char == "\\":
                show((yield from self.feed.next()))
            elif char == '"':
                in_string = not in_string
            elif not in_string:
                depth += (char in "{[") - (char in "}]")
            if depth == 0 and not in_string:
                return True

    def _word(self, show: Callable[[str], None]) -> Reading[bool]:
        """A number, true, false or null; whatever it is, up to a character that ends it."""
        is_empty = True
        while (char := (yield from self.feed.peek())) and char not in ',:}]{["<;' and not char.isspace():
            show((yield from self.feed.next()))
            is_empty = False
        return not is_empty and char != ""

    def _string(self) -> Reading[str | None]:
        """A key or a name; None if there is none, or not a valid one."""
        if not (yield from self.feed.is_at('"')):
            return None
        text = yield from self._whole_value(ends_with_line=True)
        return None if text is None else _decoded_string(text)

    def _arguments(self) -> Reading[str | None]:
        """Arguments that cannot be shown as they come; None if they are cut off or no value.

        Some models write the arguments as a string that holds JSON, as the API does.
        """
        text = yield from self._whole_value()
        if text is None or text == "null":
            return None if text is None else "{}"
        if text.startswith('"'):
            return _decoded_string(text)
        return text

    def _whole_value(self, *, ends_with_line: bool = False) -> Reading[str | None]:
        pieces: list[str] = []
        is_complete = yield from self.value(pieces.append, ends_with_line=ends_with_line)
        return "".join(pieces) if is_complete else None

    def _is_closing(self) -> Reading[bool]:
        for marker in self._closing:
            if (yield from self.feed.is_at(marker)):
                return True
        return False


def _decoded_string(text: str) -> str | None:
    """What a JSON string says; None if it is not valid."""
    try:
        value = json.loads(text, strict=False)
        value.encode()  # JSON can spell half of a character, which is no text.
    except ValueError:
        return None
    return value
