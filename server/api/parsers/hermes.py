"""Calls as Hermes, Qwen and others write them: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from jaxllm.server.api.parsers.call_reader import CallReader
from jaxllm.server.api.parsers.text_feed import Reading

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def read(reader: CallReader) -> Reading[None]:
    """Understands, too, what models get wrong: several objects in one pair of markers, a marker forgotten, a closing
    brace too few or too many (that brace is content)."""
    marker = yield from reader.content_before(OPENING)
    while marker is not None:
        reader.feed.mark(before=OPENING)
        yield from reader.feed.skip_space()
        if (yield from reader.call_object()):
            marker = yield from _end_of_call(reader)
        else:
            reader.give_back()
            marker = yield from reader.content_before(OPENING)


def _end_of_call(reader: CallReader) -> Reading[str | None]:
    """Reads up to and with the next opening marker; None at the end."""
    feed, marker = reader.feed, None
    while marker is None:
        feed.mark()
        yield from feed.skip_space()
        if not (yield from feed.peek()):
            return None
        if (yield from feed.take(CLOSING)):
            marker = CLOSING
        elif (yield from feed.take(OPENING)):
            return OPENING
        elif not (yield from reader.call_object()):
            reader.give_back()
            marker = yield from reader.content_before(CLOSING, OPENING)
            if marker != CLOSING:
                return marker
    return (yield from reader.content_before(OPENING))
