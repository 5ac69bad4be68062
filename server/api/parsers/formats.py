"""The formats by name."""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from jaxllm import ConfigError
from jaxllm.server.api.parsers import hermes, llama3_json, mistral, think
from jaxllm.server.api.parsers.call_reader import CallReader
from jaxllm.server.api.parsers.parts import ReplyPart
from jaxllm.server.api.parsers.reply_parser import ReplyParser
from jaxllm.server.api.parsers.text_feed import Reading, TextFeed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_call_id() -> str:
    """Mistral's chat templates accept no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class _ToolCallFormat:
    read: Callable[[CallReader], Reading[None]]
    markers: tuple[str, ...]
    closing: tuple[str, ...] = ()
    make_id: Callable[[], str] = _call_id

    def read_parts(self, feed: TextFeed, parts: list[ReplyPart]) -> Reading[None]:
        return self.read(CallReader(feed, parts, self.make_id, closing=self.closing))


TOOL_CALL_PARSERS = {
    "hermes": _ToolCallFormat(
        read=hermes.read,
        markers=(hermes.OPENING, hermes.CLOSING),
        closing=(hermes.CLOSING, hermes.OPENING),
    ),
    "llama3_json": _ToolCallFormat(read=llama3_json.read, markers=(llama3_json.TAG,)),
    "mistral": _ToolCallFormat(
        read=mistral.read,
        markers=(mistral.CALLS, mistral.CALL_ID, mistral.ARGS),
        closing=(mistral.CALLS,),
        make_id=_mistral_call_id,
    ),
}
REASONING_PARSERS = {"think": (think.OPENING, think.CLOSING)}


def make_reply_parser(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools_allowed: bool,
    prompt: str = "",
    said: str = "",
    parallel_tool_calls: bool = True,
) -> ReplyParser:
    """A parser for one reply.

    tool_call_parser, reasoning_parser: names as `resolve_parsers` returns them; None leaves such text in the content.
    tools_allowed: False if the request offers no tools, or tool_choice is "none": calls are then content.
    prompt: the rendered prompt, whose end tells whether the reply begins inside the reasoning.
    said: the beginning of the reply, where the prompt ends with it.
    parallel_tool_calls: if False, the reply is complete with its first call; see `ReplyParser.is_complete`.
    """
    reasoning = partial(think.read, is_open=think.is_open_after(prompt, said)) if reasoning_parser else None
    format_ = TOOL_CALL_PARSERS[tool_call_parser] if tool_call_parser and tools_allowed else None
    tool_calls = format_.read_parts if format_ else None
    return ReplyParser(reasoning, tool_calls, parallel_tool_calls=parallel_tool_calls)


def resolve_parsers(
    tool_call_parser: str | None, reasoning_parser: str | None, chat_template: str | None
) -> tuple[str | None, str | None]:
    """Checks the options' names and puts values in the place of "auto": what the chat template writes itself.

    Raises ConfigError: there is no parser of that name.
    """
    template = chat_template or ""
    if tool_call_parser == "auto":
        tool_call_parser = _tool_calls_of(template)
    if reasoning_parser == "auto":
        reasoning_parser = "think" if think.CLOSING in template else None
    _check("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS)
    _check("reasoning_parser", reasoning_parser, REASONING_PARSERS)
    return tool_call_parser, reasoning_parser


def _tool_calls_of(template: str) -> str | None:
    if mistral.CALLS in template:
        return "mistral"
    if hermes.OPENING in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"  # The exceptions, Qwen3-Coder's and GLM's, put no JSON between these markers.
    if "<|start_header_id|>" in template and '{"name": function name, "parameters": ' in template:
        return "llama3_json"
    return None


def _check(option: str, name: str | None, known: dict) -> None:
    if name is not None and name not in known:
        names = ", ".join(f'"{one}"' for one in known)
        raise ConfigError(f'{option} is "{name}"; there are {names}, and "auto", which reads the chat template.')


_special_tokens: "WeakKeyDictionary[PreTrainedTokenizerFast, frozenset[str]]" = WeakKeyDictionary()


def needs_special_tokens(
    tool_call_parser: str | None, reasoning_parser: str | None, tokenizer: "PreTrainedTokenizerFast"
) -> bool:
    """Whether markers are special tokens, so that text without these (`skip_special_tokens`) would not have them."""
    if tokenizer not in _special_tokens:
        added = tokenizer.added_tokens_decoder.values()
        _special_tokens[tokenizer] = frozenset(token.content for token in added if token.special)
    markers = TOOL_CALL_PARSERS[tool_call_parser].markers if tool_call_parser else ()
    markers += REASONING_PARSERS[reasoning_parser] if reasoning_parser else ()
    return not _special_tokens[tokenizer].isdisjoint(markers)
