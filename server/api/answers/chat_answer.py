"""The answer of /v1/chat/completions, whole or in chunks."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import Request

from jaxllm import OutputDelta, TokenLogprobs
from jaxllm.server.api.answers.chunk_writer import DONE, ChunkWriter, error_events
from jaxllm.server.api.answers.reply import Reply, start_replies
from jaxllm.server.api.call import Call
from jaxllm.server.api.generation.deltas import deltas
from jaxllm.server.api.json_body import encode_json
from jaxllm.server.api.parsers import ContentPart, ReasoningPart, ReplyPart, ToolCallArguments, ToolCallStart
from jaxllm.server.api.prompts.chat_input import messages_for_template
from jaxllm.server.api.protocol.chat_completions import ChatCompletion, ChatRequest
from jaxllm.server.api.protocol.logprobs import chat_logprobs, token_namer
from jaxllm.server.api.protocol.usage import Usage, usage_so_far

if TYPE_CHECKING:
    from jaxllm.server.api.server import Server

_PLAIN_CHUNK_TAIL = b'},"logprobs":null,"finish_reason":null}'


class ChatAnswer:
    """A conversation's answer, while the engine makes it: `whole`, or the writer of its stream (`EventWriter`).

    generation: what the engine does for it.
    """

    def __init__(self, server: "Server", body: ChatRequest, replies: Sequence[Reply]) -> None:
        self.generation = replies[0].generation
        self._name_of = token_namer(server.llm.token_text, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._body = body
        self._replies = replies
        self._prompt_token_ids = replies[0].prompt_token_ids
        self._hides_reasoning = body.include_reasoning is False
        self._thinks = server.parsers[1] is not None
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in replies]  # that were not shown yet
        self._token_ids: list[list[int]] = [[] for _ in replies]  # the same
        self._num_tokens = [0] * len(replies)
        self._created = int(time.time())
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._writer = ChunkWriter(self._fields("chat.completion.chunk"), include_usage=self._include_usage)
        self._counts = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._is_plain = [reply.is_plain and not self._counts and not body.return_token_ids for reply in replies]
        self._has_begun = [False] * len(replies)
        self._plain_heads = [b'{"index":%d,"delta":{"content":' % index for index in range(len(replies))]

    @classmethod
    async def start(cls, server: "Server", request: Request, call: Call, body: ChatRequest) -> "ChatAnswer":
        """Raises what `start_replies` does."""
        replies = await start_replies(
            server,
            request,
            call,
            messages_for_template(body.messages),
            body.to_sampling_params(),
            tools=[tool.for_template() for tool in body.tools or ()] if body.may_call_tools else (),
            template=body.chat_template,
            template_kwargs=body.template_kwargs(),
            add_generation_prompt=body.begins_answer,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            request_id=f"chatcmpl-{uuid4().hex}",
            is_streamed=bool(body.stream),
        )
        return cls(server, body, replies)

    async def whole(self) -> ChatCompletion:
        """Waits for all choices. Raises what `Generation.take` does."""
        parts: list[list[ReplyPart]] = [[] for _ in self._replies]
        async for delta in deltas(self.generation):
            parts[delta.index] += self._read(delta)
        choices = [
            {
                "index": index,
                "message": _message(parts[index]),
                "logprobs": self._shown_logprobs(index) if self._body.logprobs else None,
                "finish_reason": _finish_reason(reply),
                "stop_reason": reply.stop_reason,
            }
            | ({"token_ids": self._token_ids[index]} if self._body.return_token_ids else {})
            for index, reply in enumerate(self._replies)
        ]
        prompt = {"prompt_token_ids": self._prompt_token_ids} if self._body.return_token_ids else {}
        fields = self._fields("chat.completion") | {"choices": choices, "usage": await self._usage()} | prompt
        return ChatCompletion.model_validate(fields)

    def begin(self) -> bytes:
        return b""

    def add(self, delta: OutputDelta) -> bytes:
        index = delta.index
        if not self._has_begun[index]:
            self._has_begun[index] = True
            return self._first_chunk(index) + self._chunks(delta)
        if self._is_plain[index] and delta.logprobs is None and delta.finish_reason is None:
            if not delta.text:
                return b""
            return self._writer.chunk(self._plain_heads[index] + encode_json(delta.text) + _PLAIN_CHUNK_TAIL)
        return self._chunks(delta)

    async def end(self) -> bytes:
        return (self._writer.usage(await self._usage()) if self._include_usage else b"") + DONE

    fail = staticmethod(error_events)

    def _chunks(self, delta: OutputDelta) -> bytes:
        """Of one delta in general: a chunk for each part, and one for the finish reason."""
        index, reply = delta.index, self._replies[delta.index]
        parts = self._read(delta)
        finish_reason = _finish_reason(reply)
        of_tokens: dict[str, Any] = {}
        # What is told of tokens, which know nothing of parts, goes with the first.
        if parts or finish_reason is not None:
            if self._logprobs[index]:
                of_tokens["logprobs"] = self._shown_logprobs(index)
            if self._token_ids[index]:
                of_tokens["token_ids"], self._token_ids[index] = self._token_ids[index], []
            if of_tokens:
                parts = parts or [ContentPart("")]
        choices = [
            _choice(index, _delta_of(part), **({} if number else of_tokens)) for number, part in enumerate(parts)
        ]
        if finish_reason is not None:
            choices.append(_choice(index, {}, finish_reason=finish_reason, stop_reason=reply.stop_reason))
        if not self._counts:
            return b"".join(map(self._writer.chunk, choices))
        usage = self._usage_so_far(index)
        return b"".join(self._writer.chunk_with(choice, usage) for choice in choices)

    def _first_chunk(self, index: int) -> bytes:
        prompt = {"prompt_token_ids": self._prompt_token_ids} if self._body.return_token_ids else {}
        usage = self._usage_so_far(index) if self._counts else {}
        return self._writer.chunk_with(_choice(index, {"role": "assistant", "content": ""}), prompt | usage)

    def _read(self, delta: OutputDelta) -> list[ReplyPart]:
        """The new parts that are to be shown. What is told of the tokens is kept until then."""
        index = delta.index
        parts = self._replies[index].read(delta)
        self._logprobs[index] += delta.logprobs or ()
        if self._counts:
            self._num_tokens[index] += len(delta.token_ids)
        if self._body.return_token_ids:
            self._token_ids[index] += delta.token_ids
        return [part for part in parts if not isinstance(part, ReasoningPart)] if self._hides_reasoning else parts

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.generation.request_id, "object": kind, "created": self._created, "model": self._body.model}

    def _shown_logprobs(self, index: int) -> dict[str, Any]:
        shown, self._logprobs[index] = self._logprobs[index], []
        content = chat_logprobs(self._name_of, shown, self._body.top_logprobs or 0)
        return {"content": content, "refusal": None}

    def _usage_so_far(self, index: int) -> dict[str, Any]:
        return {"usage": usage_so_far(self.generation.num_prompt_tokens, self._num_tokens[index])}

    async def _usage(self) -> Usage:
        num_reasoning = sum([await reply.num_reasoning_tokens() for reply in self._replies]) if self._thinks else None
        return Usage.of([self.generation], num_reasoning_tokens=num_reasoning)


def _finish_reason(reply: Reply) -> str | None:
    return "tool_calls" if reply.has_calls and reply.finish_reason == "stop" else reply.finish_reason


def _message(parts: Sequence[ReplyPart]) -> dict[str, Any]:
    """The fields of an `AnsweredMessage`."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for part in parts:
        match part:
            case ContentPart(text):
                content += text
            case ReasoningPart(text):
                reasoning += text
            case ToolCallStart(_, id_, name):
                calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolCallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _delta_of(part: ReplyPart) -> dict[str, Any]:
    match part:
        case ContentPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return _reasoning(text)
        case ToolCallStart(index, id_, name):
            call = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _reasoning(text: str) -> dict[str, str]:
    """Under both of its names: clients of vLLM read the second one."""
    return {"reasoning_content": text, "reasoning": text}


def _choice(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    token_ids: list[int] | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return encode_json(choice if finish_reason is None else choice | {"stop_reason": stop_reason})
