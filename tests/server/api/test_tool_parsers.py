"""Tool calls in a reply's text: however the text is cut, the same calls come out, and no text is lost."""

import json
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from jaxllm import ConfigError
from jaxllm.server.api.parsers import (
    TOOL_CALL_PARSERS,
    ContentPart,
    ReplyPart,
    ToolCallArguments,
    ToolCallStart,
    make_reply_parser,
    needs_special_tokens,
    resolve_parsers,
)

FORMATS = list(TOOL_CALL_PARSERS)


@dataclass
class Reply:
    """What a client has in the end."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, parts: list[ReplyPart]) -> "Reply":
        for part in parts:
            match part:
                case ContentPart(text):
                    self.content += text
                case ToolCallStart(index, id_, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(id_)
                case ToolCallArguments(index, text):
                    assert index == len(self.calls) - 1, "the arguments of a call come before the next call"
                    self.calls[index] = (self.calls[index][0], self.calls[index][1] + text)
                case _:
                    raise AssertionError(part)
        return self


def parse(name: str, *pieces: str, **options: bool) -> Reply:
    parser = make_reply_parser(name, None, tools_allowed=True, **options)
    reply = Reply()
    for piece in pieces:
        reply.add(parser.append(piece))
    return reply.add(parser.finish())


def same(reply: Reply) -> tuple[str, list[tuple[str, str]]]:
    return reply.content, reply.calls


# name of the format, text, content, calls
CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes: text, then two calls": (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🌧", "days": [1, 2]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me see.",
        [("weather", '{"city": "Zürich 🌧", "days": [1, 2]}'), ("now", "{}")],
    ),
    "hermes: text after a call": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone.\n',
        "\nDone.\n",
        [("f", '{"a": 1}')],
    ),
    "hermes: markers and braces in strings": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> \\" } \\\\"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call> \\" } \\\\"}')],
    ),
    "hermes: no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "hermes: arguments that are null": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "hermes: arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "hermes: arguments as a string": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>',
        "",
        [("f", '{"a": "b"}')],
    ),
    "hermes: further keys": (
        "hermes",
        '<tool_call>{"id": 7, "name": "f", "why": {"x": []}, "arguments": {"a": 1}, "sure": true}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "hermes: two objects in one pair of markers": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "hermes: never closed": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n',
        "",
        [("f", '{"a": 1}')],
    ),
    "hermes: closed by the next": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool_call>{"name": "g", "arguments": {"b": 2}}</tool_call>',
        "",
        [("f", '{"a": 1}'), ("g", '{"b": 2}')],
    ),
    "hermes: cut off in the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "xy',
        "",
        [("f", '{"a": "xy')],
    ),
    "hermes: a brace too few": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", '{"a": {"b": 1}}'), ("g", "{}")],
    ),
    "hermes: a brace too many": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>',
        "}",
        [("f", '{"a": 1}')],
    ),
    "hermes: a quote forgotten": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", '{"a": "x}}\n'), ("g", "{}")],
    ),
    "hermes: junk behind the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, so "there"}</tool_call> ok',
        ', so "there"} ok',
        [("f", '{"a": 1}')],
    ),
    "llama3_json: two calls": (
        "llama3_json",
        '{"name": "f", "parameters": {"a": "b; {"}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": "b; {"}'), ("g", "{}")],
    ),
    "llama3_json: with a tag": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
        "",
        [("f", '{"a": 1}')],
    ),
    "llama3_json: a tag after text": (
        "llama3_json",
        'Well: <|python_tag|>{"name": "f", "arguments": {"a": 1}}',
        "Well:",
        [("f", '{"a": 1}')],
    ),
    "llama3_json: text after a call": (
        "llama3_json",
        '\n{"name": "f", "parameters": {}}; and so on',
        "; and so on",
        [("f", "{}")],
    ),
    "mistral: a list": (
        "mistral",
        'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"a": [[1]]}}, {"name": "g", "arguments": {}, "id": "abc"}]',
        "Well.",
        [("f", '{"a": [[1]]}'), ("g", "{}")],
    ),
    "mistral: one object": ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    "mistral: names": (
        "mistral",
        '[TOOL_CALLS]get_a[ARGS]{"a": [1]}[TOOL_CALLS]b.c-d[CALL_ID]123456789[ARGS]{"b": "[TOOL_CALLS]"}',
        "",
        [("get_a", '{"a": [1]}'), ("b.c-d", '{"b": "[TOOL_CALLS]"}')],
    ),
    "mistral: names without ARGS": (
        "mistral",
        'Now [TOOL_CALLS]f{"a": 3.5}[TOOL_CALLS]g{}',
        "Now",
        [("f", '{"a": 3.5}'), ("g", "{}")],
    ),
    "mistral: cut off, and called again": (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": [1, [TOOL_CALLS]g[ARGS]{"b": 2}',
        "",
        [("f", '{"a": [1, '), ("g", '{"b": 2}')],
    ),
}

# Text in which there is no call.
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", ""),
    ("hermes", "A < b, <tool, </tool_call> and \n"),
    ("hermes", "Use <tool_call> for calls.\n\n<tool_call>\n"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>'),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arg'),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f, "arguments": {}}\n</tool_call>\nSorry.'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud83d"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "}</tool_call>'),
    ("hermes", "<tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</tool_call>"),
    ("llama3_json", '{"city": "Bern", "name": "x", "parameters": {}}'),
    ("llama3_json", '{"name": "Ada"}'),
    ("llama3_json", 'The call is {"name": "f", "parameters": {}}'),
    ("llama3_json", " {} "),
    ("llama3_json", "<|python_tag|>print({1: 2})\n"),
    ("llama3_json", '{"name": "f", "parameters": tru'),
    ("mistral", "[1] [TOOL_CALLS"),
    ("mistral", "[TOOL_CALLS] none today"),
    ("mistral", "[TOOL_CALLS] [TOOL_CALLS][ARGS]{}"),
    ("mistral", '[TOOL_CALLS][ARGS]{"a": 1}'),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS] [{'name': 'f', 'arguments': {}}]"),
]


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found(case):
    name, text, content, calls = CASES[case]
    assert same(parse(name, text)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_comes_out_as_content(name, text):
    assert same(parse(name, text)) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"), [case[:2] for case in CASES.values()] + NO_CALLS, ids=lambda value: repr(value)[:40]
)
def test_no_cut_makes_a_difference(name, text):
    whole = same(parse(name, text))
    for cut in range(len(text) + 1):
        assert same(parse(name, text[:cut], text[cut:])) == whole, f"cut after {text[:cut]!r}"
    assert same(parse(name, *text)) == whole


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "abc123", "f"),
        *('{"name": "f", "arguments": {', '{"name": "g"', '"parameters": ', '"arguments": ', '"name": "h"', '"k": 1'),
        *("{", "}", "[", "]", ",", ":", ";", '"', "\\", "\n", " ", "<", "</", "[TOOL", "null", "ok.", '"s"', "é🌧"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(FRAGMENTS, max_size=14), st.data())
def test_no_cut_of_any_text_makes_a_difference_and_nothing_is_lost(name, fragments, data):
    text = "".join(fragments)
    whole = parse(name, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert same(parse(name, *pieces)) == same(whole)
    assert same(parse(name, *text)) == same(whole)
    if not whole.calls:
        assert whole.content == text
    assert all(called for called, _ in whole.calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[A-Za-z_][\w.-]{0,8}", fullmatch=True), st.dictionaries(st.text(), JSON, max_size=4)),
    min_size=1,
    max_size=3,
)


def written(name: str, calls: list[tuple[str, dict]], indent: int | None, ensure_ascii: bool) -> str:
    """The calls as a model writes them."""

    def to_json(value: object) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    objects = [{"name": called, "arguments": arguments} for called, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{to_json(one)}\n</tool_call>" for one in objects)
        case "llama3_json":
            return "; ".join(to_json({"name": called, "parameters": arguments}) for called, arguments in calls)
        case "mistral":
            return f"[TOOL_CALLS] {to_json(objects)}"
        case "mistral names":
            return "".join(f"[TOOL_CALLS]{called}[ARGS]{to_json(arguments)}" for called, arguments in calls)
    raise AssertionError(name)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*FORMATS, "mistral names"]), CALLS, st.sampled_from([None, 2]), st.booleans())
@example("hermes", [("f", {"</tool_call>": "<tool_call>\n\\"})], None, False)
@example("mistral names", [("f", {"[TOOL_CALLS]": ["[ARGS]{"]})], 2, True)
def test_every_call_comes_back_as_it_was_meant(name, calls, indent, ensure_ascii):
    calls = [(called, arguments) for called, arguments in calls if called.isascii()]
    text = written(name, calls, indent, ensure_ascii)
    for pieces in ([text], list(text)):
        reply = parse(name.split()[0], *pieces)
        assert [(called, json.loads(arguments)) for called, arguments in reply.calls] == calls
        assert not reply.content or not calls


@pytest.mark.parametrize("name", [*FORMATS, "mistral names"])
def test_arguments_are_shown_as_they_come(name):
    """All but the last character or two of what has come of the arguments has been passed on."""
    text = written(name, [("f", {"text": "word " * 20})], None, False)
    start = text.index('{"text"')
    parser = make_reply_parser(name.split()[0], None, tools_allowed=True)
    reply = Reply().add(parser.append(text[: start + 1]))
    assert reply.calls == [("f", "{")]
    for end in range(start + 2, start + 60):
        reply.add(parser.append(text[end - 1]))
        assert reply.calls == [("f", text[start:end])]


@pytest.mark.parametrize("name", FORMATS)
def test_content_is_held_back_only_while_it_may_be_a_marker(name):
    parser = make_reply_parser(name, None, tools_allowed=True)
    reply = Reply()
    for word in ("One", " two", " <b>", " [x]", " {y}", "."):
        reply.add(parser.append(word))
    assert reply.content == "One two <b> [x] {y}."
    assert parser.append(" \n") == []  # Space before a call would be dropped.
    assert parser.finish() == [ContentPart(" \n")]


def test_a_forgotten_quote_holds_nothing_back_beyond_its_line():
    parser = make_reply_parser("hermes", None, tools_allowed=True)
    text = '<tool_call>{"name: 1}\n</tool_call>\nAnd'
    assert parser.append(text) == [ContentPart(text)]


@pytest.mark.parametrize("name", FORMATS)
def test_ids_differ_and_have_the_form_that_chat_templates_want(name):
    text = written(name, [("f", {}), ("f", {}), ("f", {})], None, False)
    ids = parse(name, text).ids + parse(name, text).ids
    assert len(set(ids)) == 6
    if name == "mistral":
        assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    else:
        assert all(id_.startswith("call_") for id_ in ids)


@pytest.mark.parametrize("name", FORMATS)
def test_without_parallel_calls_the_reply_ends_with_the_first(name):
    text = written(name, [("f", {"a": 1}), ("g", {})], None, False) + "\nmore"
    for pieces in ([text], list(text)):
        assert same(parse(name, *pieces, parallel_tool_calls=False)) == ("", [("f", '{"a": 1}')])
    parser = make_reply_parser(name, None, tools_allowed=True, parallel_tool_calls=False)
    parser.append(text)
    assert parser.is_complete


def test_where_no_tools_are_allowed_calls_are_content():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = make_reply_parser("hermes", None, tools_allowed=False)
    assert parser.append(text) + parser.finish() == [ContentPart(text)]


@pytest.mark.parametrize("text", ["<tool_call>" * 20_000, '<tool_call>{"arguments": {"a": ' * 4_000, "\n" * 50_000])
def test_time_is_linear_in_what_a_model_may_be_made_to_write(text):
    start = time.perf_counter()
    parser = make_reply_parser("hermes", None, tools_allowed=True)
    content = "".join(part.text for piece in range(0, len(text), 4) for part in parser.append(text[piece : piece + 4]))
    content += "".join(part.text for part in parser.finish())
    assert content == text
    assert time.perf_counter() - start < 10


LLAMA3 = """<|start_header_id|>system<|end_header_id|>
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}."""


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        (
            "return a json object …\n<tool_call>\n{\"name\": <function-name>} … {{ '</think>' }}",
            ("hermes", "think"),
        ),  # Qwen3
        ("{{ '[AVAILABLE_TOOLS]' }} {{ '[TOOL_CALLS] [' }}", ("mistral", None)),
        (LLAMA3, ("llama3_json", None)),
        ("<tool_call>\n<function=example_function_name>", (None, None)),  # Qwen3-Coder: not JSON
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", (None, None)),  # GLM-4.5: neither
        ("<|im_start|>{{ message.role }}", (None, None)),
        (None, (None, None)),
    ],
)
def test_auto_is_what_the_chat_template_writes(template, parsers):
    assert resolve_parsers("auto", "auto", template) == parsers
    assert resolve_parsers("mistral", None, template) == ("mistral", None)


def test_markers_that_are_special_tokens_need_to_be_shown():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("<think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert needs_special_tokens("mistral", None, tokenizer)
    assert needs_special_tokens("mistral", "think", tokenizer)
    assert not needs_special_tokens("hermes", "think", tokenizer)
    assert not needs_special_tokens(None, None, tokenizer)


def test_an_unknown_parser_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(
        ConfigError, match=r'tool_call_parser is "hermes2"; there are "hermes", "llama3_json", "mistral"'
    ):
        resolve_parsers("hermes2", None, None)
    with pytest.raises(ConfigError, match=r'reasoning_parser is "cot"; there are "think"'):
        resolve_parsers(None, "cot", None)
