"""Tool calls and reasoning in what a model writes.

formats.py                               the names, and which one a model needs
reply_parser.py, parts.py                a reply's parser, and what comes out of it
hermes.py, llama3_json.py, mistral.py    formats of tool calls
think.py                                 reasoning
call_reader.py, text_feed.py             what these are written with
"""

from jaxllm.server.api.parsers.formats import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    make_reply_parser,
    needs_special_tokens,
    resolve_parsers,
)
from jaxllm.server.api.parsers.parts import ContentPart, ReasoningPart, ReplyPart, ToolCallArguments, ToolCallStart
from jaxllm.server.api.parsers.reply_parser import ReplyParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "ContentPart",
    "ReasoningPart",
    "ReplyParser",
    "ReplyPart",
    "ToolCallArguments",
    "ToolCallStart",
    "make_reply_parser",
    "needs_special_tokens",
    "resolve_parsers",
]
