"""Calls as Mistral's models write them, behind content if there is any.

Until tokenizer version 7: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
From version 11: [TOOL_CALLS]name[ARGS]{…}, repeated for each call, in some with [CALL_ID]… before [ARGS], in some
without [ARGS].
"""

from jaxllm.server.api.parsers.call_reader import CallReader
from jaxllm.server.api.parsers.text_feed import Reading

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read(reader: CallReader) -> Reading[None]:
    feed = reader.feed
    while (yield from reader.content_before(CALLS)) is not None:
        feed.mark(before=CALLS)
        yield from feed.skip_space()
        first = yield from feed.peek()
        if first == "[":
            is_call = yield from _list(reader)
        elif first == "{":
            is_call = yield from reader.call_object()
        else:
            is_call = yield from _named(reader)
        if not is_call:
            reader.give_back()


def _list(reader: CallReader) -> Reading[bool]:
    """Reads a list of calls; what follows its last call and is no call is left."""
    feed = reader.feed
    if (yield from feed.is_at(CALLS)) or not (yield from feed.take("[")):
        return False
    yield from feed.skip_space()
    if not (yield from reader.call_object()):
        return False
    while True:
        feed.mark()
        yield from feed.skip_space()
        if (yield from feed.take("]")):
            feed.take_marked()
            return True
        if (yield from feed.take(",")):
            yield from feed.skip_space()
        if not (yield from reader.call_object()):
            return False


def _named(reader: CallReader) -> Reading[bool]:
    feed = reader.feed
    name = yield from _word(reader)
    if (yield from feed.take(CALL_ID)):
        yield from _word(reader)  # The calls get ids of ours.
    yield from feed.take(ARGS)
    yield from feed.skip_space()
    if not name or not (yield from feed.is_at("{")):
        return False
    reader.start_call(name)
    yield from reader.value(reader.arguments)
    return True


def _word(reader: CallReader) -> Reading[str]:
    word = ""
    while (char := (yield from reader.feed.peek())).isalnum() or (char and char in "_-."):
        word += yield from reader.feed.next()
    return word
