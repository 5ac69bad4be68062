"""Reasoning between <think> and </think> at the beginning of a reply. Anywhere else the markers are content."""

from jaxllm.server.api.parsers.parts import ContentPart, ReasoningPart, ReplyPart
from jaxllm.server.api.parsers.text_feed import Reading, TextFeed

OPENING, CLOSING = "<think>", "</think>"


def is_open_after(prompt: str, said: str = "") -> bool:
    """Whether the chat template, or what was `said` of the reply, has begun the reasoning, with which the rest goes
    on."""
    return prompt.rstrip().endswith(OPENING) or (said.lstrip().startswith(OPENING) and CLOSING not in said)


def read(feed: TextFeed, parts: list[ReplyPart], *, is_open: bool) -> Reading[None]:
    """The space beside the markers is dropped. What does not end is reasoning to the end."""

    def show_reasoning(text: str) -> None:
        parts.append(ReasoningPart(text))

    feed.mark()
    yield from feed.skip_space()
    has_opening = yield from feed.take(OPENING)
    space = feed.take_marked()
    if has_opening or is_open:
        yield from feed.skip_space()
        space, closing = yield from feed.pass_on((CLOSING,), show_reasoning)
        if closing is None:
            show_reasoning(space)
            return
        yield from feed.skip_space()
        space = ""
    parts.append(ContentPart(space))
    while True:
        parts.append(ContentPart(feed.take_all()))
        if feed.has_ended:
            return
        yield
