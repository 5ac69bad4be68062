"""Reasoning at the beginning of a reply, cut in any way, alone and before tool calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.server.api.parsers import (
    ContentPart,
    ReasoningPart,
    ReplyPart,
    ToolCallArguments,
    ToolCallStart,
    make_reply_parser,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'
OPEN_PROMPT = "<|im_start|>assistant\n<think>\n"  # DeepSeek-R1's, QwQ's and Qwen3-Thinking's templates end like this.


def parse(*pieces: str, prompt: str = "") -> tuple[str, str, str]:
    """Reasoning, content and calls."""
    parser = make_reply_parser("hermes", "think", tools_allowed=True, prompt=prompt)
    parts: list[ReplyPart] = []
    for piece in pieces:
        parts += parser.append(piece)
    reasoning = content = calls = ""
    for part in parts + parser.finish():
        match part:
            case ReasoningPart(text):
                assert not content
                assert not calls, "reasoning comes first"
                reasoning += text
            case ContentPart(text):
                content += text
            case ToolCallStart(index, _, name):
                calls += f"{index} {name} "
            case ToolCallArguments(_, text):
                calls += text
    return reasoning, content, calls


# prompt, text, what comes of it
CASES = [
    ("", "<think>\nHm. 1 < 2?\n\nYes.\n</think>\n\nYes, it is.\n", ("Hm. 1 < 2?\n\nYes.", "Yes, it is.\n", "")),
    ("", " \n<think>a</think>b", ("a", "b", "")),
    ("", "<think>\n\n</think>\n\nFast.", ("", "Fast.", "")),
    ("", "No thoughts.", ("", "No thoughts.", "")),
    ("", "\nThe <think> tag, and </think>.", ("", "\nThe <think> tag, and </think>.", "")),
    ("", "<thin", ("", "<thin", "")),
    ("", "", ("", "", "")),
    ("", "<think>cut off </thi", ("cut off </thi", "", "")),
    ("", "<think>done</think>", ("done", "", "")),
    ("", "<think>a</think>b <think>c</think>", ("a", "b <think>c</think>", "")),
    ("", "<think><tool_call>{} is how I call.</think>No.", ("<tool_call>{} is how I call.", "No.", "")),
    (OPEN_PROMPT, "Well.\n</think>\n\nHello.", ("Well.", "Hello.", "")),
    (OPEN_PROMPT, "<think>\nWell.\n</think>\n\nHello.", ("Well.", "Hello.", "")),
    (OPEN_PROMPT, "It goes on", ("It goes on", "", "")),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hello </think>.", ("", "Hello </think>.", "")),
    (OPEN_PROMPT, f"I call.\n</think>\n\n{CALL}", ("I call.", "", '0 f {"a": "</think>"}')),
    ("", f"<think>t</think>\nNow: {CALL}", ("t", "Now:", '0 f {"a": "</think>"}')),
]


@pytest.mark.parametrize(("prompt", "text", "expected"), CASES)
def test_reasoning_content_and_calls_are_told_apart_however_the_text_is_cut(prompt, text, expected):
    assert parse(text, prompt=prompt) == expected
    for cut in range(len(text) + 1):
        assert parse(text[:cut], text[cut:], prompt=prompt) == expected, f"cut after {text[:cut]!r}"
    assert parse(*text, prompt=prompt) == expected


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<", "</", "think>", "\n", " ", "word", CALL, "<tool_call>", "é🌧", "</tool_call>"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=10), st.booleans(), st.data())
def test_no_cut_of_any_text_makes_a_difference_and_no_word_is_lost(fragments, is_open, data):
    text, prompt = "".join(fragments), OPEN_PROMPT if is_open else ""
    whole = parse(text, prompt=prompt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(*pieces, prompt=prompt) == whole
    assert parse(*text, prompt=prompt) == whole
    assert sum(piece.count("word") for piece in whole) == text.count("word")


def test_reasoning_is_shown_as_it_comes():
    parser = make_reply_parser(None, "think", tools_allowed=False)
    assert parser.append("<think>\n") == []
    assert parser.append("One two") == [ReasoningPart("One two")]
    assert parser.append(" <") == []
    assert parser.append("3") == [ReasoningPart(" <3")]
    assert parser.append("\n</think>\n\nA") == [ContentPart("A")]
    assert parser.append(" \n") == [ContentPart(" \n")]
    assert parser.finish() == []


def test_without_a_parser_reasoning_is_content():
    parser = make_reply_parser(None, None, tools_allowed=False, prompt=OPEN_PROMPT)
    assert parser.append("<think>a</think>b") == [ContentPart("<think>a</think>b")]
    assert parser.finish() == []
