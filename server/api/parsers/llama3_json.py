"""Calls as Llama 3 writes them: {"name": …, "parameters": {…}}, with "; " between several, and no other text before.

<|python_tag|> may stand before the first; behind it, calls may also follow text. What follows it and is no call, such
as Python code, is content.
"""

from jaxllm.server.api.parsers.call_reader import CallReader
from jaxllm.server.api.parsers.text_feed import Reading

TAG = "<|python_tag|>"


def read(reader: CallReader) -> Reading[None]:
    feed = reader.feed
    feed.mark()
    yield from feed.skip_space()
    has_tag = yield from feed.take(TAG)
    while True:
        yield from feed.skip_space()
        while (yield from reader.call_object(strictly=not has_tag)):
            feed.mark()
            yield from feed.skip_space()
            if (yield from feed.take(";")):
                yield from feed.skip_space()
        reader.give_back()
        if (yield from reader.content_before(TAG)) is None:
            return
        feed.mark(before=TAG)
        has_tag = True
