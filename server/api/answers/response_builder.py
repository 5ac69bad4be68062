"""Puts a response of /v1/responses together, and tells of it in the events of its stream."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm import Conversation
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.json_body import encode_json
from jaxllm.server.api.parsers import ContentPart, ReasoningPart, ReplyPart, ToolCallArguments, ToolCallStart

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseBuilder:
    """Every method returns the events that tell of what it did, ready to be sent.

    response: so far; without the item that is being written.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._num_events = 0
        self._item: dict[str, Any] | None = None
        self._place: dict[str, Any] = {}  # of the open item, in its events
        self._pieces: list[str] = []

    def begin(self) -> bytes:
        """The response exists, and is being made."""
        return self._response_event("response.created") + self._response_event("response.in_progress")

    def add(self, parts: Sequence[ReplyPart]) -> bytes:
        """The reply goes on."""
        return b"".join(event for part in parts for event in self._part(part))

    def end(self, finish_reason: str | None, usage: dict[str, Any]) -> bytes:
        """The reply has ended, with the finish reason "stop" or "length"."""
        is_complete = finish_reason != "length"
        events = b"".join(self._leave("completed" if is_complete else "incomplete"))
        self.response["usage"] = usage
        if is_complete:
            return events + self._finish("completed", completed_at=int(time.time()))
        return events + self._finish("incomplete", incomplete_details={"reason": "max_output_tokens"})

    def fail(self, error: ApiError) -> bytes:
        """The reply has failed; what there is of it stays."""
        events = b"".join(self._leave("incomplete"))
        return events + self._finish("failed", error={"code": "server_error", "message": error.message})

    def cancel(self) -> None:
        """The client wants no more of it; what there is of it stays."""
        list(self._leave("incomplete"))
        self.response["status"] = "cancelled"

    def add_to(self, conversation: Conversation) -> None:
        """Appends the output."""
        for item in self.response["output"]:
            match item["type"]:
                case "message":
                    conversation.answer(item["content"][0]["text"])
                case "reasoning":
                    conversation.think(item["content"][0]["text"])
                case "function_call":
                    conversation.call(item["call_id"], item["name"], item["arguments"])

    def _part(self, part: ReplyPart) -> Iterator[bytes]:
        match part:
            case ContentPart(text):
                yield from self._enter("message")
                yield self._delta("response.output_text.delta", text, logprobs=[])
            case ReasoningPart(text):
                yield from self._enter("reasoning")
                yield self._delta("response.reasoning_text.delta", text)
            case ToolCallStart(_, call_id, name):
                yield from self._leave()
                yield from self._enter("function_call", call_id=call_id, name=name, arguments="")
            case ToolCallArguments(_, text):
                yield self._delta("response.function_call_arguments.delta", text)

    def _enter(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Opens an item, unless one of the kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._leave()
        self._item = {"id": f"{_ID_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        self._item |= fields | ({"role": "assistant"} if kind == "message" else {})
        self._item |= {} if kind == "function_call" else {"content": []}
        self._item |= {"summary": []} if kind == "reasoning" else {}
        index = len(self.response["output"])
        yield self._event("response.output_item.added", output_index=index, item=self._item)
        self._place = {"item_id": self._item["id"], "output_index": index}
        if kind in _TEXT_EVENTS:
            self._place["content_index"] = 0
            yield self._event("response.content_part.added", **self._place, part=_text_part(kind, ""))

    def _leave(self, status: str = "completed") -> Iterator[bytes]:
        """Closes the open item, if there is one."""
        if self._item is None:
            return
        item, self._item = self._item, None
        kind, text = item["type"], "".join(self._pieces)
        self._pieces.clear()
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            yield self._event(name, **self._place, name=item["name"], arguments=text)
        else:
            part = _text_part(kind, text)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"{_TEXT_EVENTS[kind]}.done", **self._place, text=text, **more)
            yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=self._place["output_index"], item=item)
        self.response["output"].append(item)

    def _delta(self, name: str, text: str, /, **fields: Any) -> bytes:
        self._pieces.append(text)
        return self._event(name, **self._place, delta=text, **fields)

    def _finish(self, status: str, **fields: Any) -> bytes:
        self.response |= {"status": status, **fields}
        return self._response_event(f"response.{status}")

    def _response_event(self, name: str) -> bytes:
        return self._event(name, response=self.response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        body = encode_json({"type": name, "sequence_number": number, **fields})
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def _text_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
