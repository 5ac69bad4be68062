"""Puts a message of /v1/messages together, and tells of it in the events of its stream."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm import Conversation
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.json_body import encode_json
from jaxllm.server.api.parsers import ContentPart, ReasoningPart, ReplyPart, ToolCallArguments, ToolCallStart

# Of a block's text: the field that holds it, and the type and field of its deltas.
_FIELDS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class MessageBuilder:
    """Every method returns the events that tell of what it did, ready to be sent.

    message: so far; without the text of the block that is being written.
    """

    def __init__(self, model: str, request_id: str) -> None:
        """request_id: that of the HTTP request, for an error."""
        self._request_id = request_id
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {},
        }
        self._block: dict[str, Any] | None = None
        self._pieces: list[str] = []

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The prompt has been taken in."""
        self.message["usage"] = _usage(num_prompt_tokens, 0, 0)
        return _event("message_start", message=self.message)

    def add(self, parts: Sequence[ReplyPart]) -> bytes:
        """The reply goes on."""
        return b"".join(event for part in parts for event in self._part(part))

    def end(
        self,
        finish_reason: str | None,
        stop_reason: int | str | None,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
    ) -> bytes:
        """The reply has ended; reasons as in OutputDelta."""
        events = b"".join(self._leave())
        if finish_reason == "length":
            ending = {"stop_reason": "max_tokens", "stop_sequence": None}
        elif isinstance(stop_reason, str):
            ending = {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        elif any(block["type"] == "tool_use" for block in self.message["content"]):
            ending = {"stop_reason": "tool_use", "stop_sequence": None}
        else:
            ending = {"stop_reason": "end_turn", "stop_sequence": None}
        usage = _usage(num_prompt_tokens, num_cached_tokens, num_output_tokens)
        self.message |= {**ending, "usage": usage}
        return events + _event("message_delta", delta=ending, usage=usage) + _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """The reply has failed."""
        return b"event: error\ndata: " + encode_json(error.anthropic_body(self._request_id)) + b"\n\n"

    def _part(self, part: ReplyPart) -> Iterator[bytes]:
        match part:
            case ContentPart(text):
                yield from self._enter({"type": "text", "text": "", "citations": None})
                yield self._delta(text)
            case ReasoningPart(text):
                yield from self._enter({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(text)
            case ToolCallStart(_, call_id, name):
                yield from self._leave()
                yield from self._enter({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolCallArguments(_, text):
                yield self._delta(text)

    def _enter(self, block: dict[str, Any]) -> Iterator[bytes]:
        """Opens a block, unless one of its type is open."""
        if self._block is not None and self._block["type"] == block["type"]:
            return
        yield from self._leave()
        self._block = block
        self.message["content"].append(block)
        yield _event("content_block_start", index=self._index, content_block=block)

    def _leave(self) -> Iterator[bytes]:
        """Closes the open block, if there is one."""
        if self._block is None:
            return
        field, text = _FIELDS[self._block["type"]][0], "".join(self._pieces)
        self._block[field] = Conversation.parse_arguments(text) if field == "input" else text
        self._block = None
        self._pieces.clear()
        yield _event("content_block_stop", index=self._index)

    def _delta(self, text: str) -> bytes:
        assert self._block is not None
        self._pieces.append(text)
        _, kind, field = _FIELDS[self._block["type"]]
        return _event("content_block_delta", index=self._index, delta={"type": kind, field: text})

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_read_input_tokens": num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode_json({"type": name, **fields}) + b"\n\n"
