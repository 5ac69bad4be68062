"""The answer of /v1/chat/completions, whole or in chunks."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import Request

from jaxllm import OutputDelta, TokenLogprobs
from jaxllm.server.api_errors import ApiError
from jaxllm.server.call import Call
from jaxllm.server.generation import Generation
from jaxllm.server.parsers import (
    ContentPart,
    ReasoningPart,
    ReplyParser,
    ReplyPart,
    ToolCallArguments,
    ToolCallStart,
    make_reply_parser,
    needs_special_tokens,
)
from jaxllm.server.protocol.chat import ChatCompletion, ChatRequest
from jaxllm.server.protocol.logprobs import chat_logprobs
from jaxllm.server.protocol.usage import Usage
from jaxllm.server.reply import check_tools
from jaxllm.server.streaming import DONE, ChunkWriter, encode_json

if TYPE_CHECKING:
    from jaxllm.server.app import Server

_PLAIN_CHUNK_TAIL = b'},"logprobs":null,"finish_reason":null}'


class ChatAnswer:
    """A conversation's answer, while the engine makes it. Read it once, by `whole` or by `events`."""

    def __init__(self, server: "Server", body: ChatRequest, generation: Generation, prompt: str) -> None:
        self._llm = server.llm
        self._body = body
        self._generation = generation
        self._created = int(time.time())
        self._replies = [_Reply(_parser(server, body, prompt)) for _ in range(generation.params.n)]

    @classmethod
    async def start(cls, server: "Server", request: Request, call: Call, body: ChatRequest) -> "ChatAnswer":
        """Renders the conversation and gives it to the engine. Raises ApiError, and what `Generation.start` does."""
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if body.may_call_tools else []
        check_tools(server, tools)
        prompt, token_ids = await server.templates.render(
            _messages(body),
            tools=tools,
            template=body.chat_template,
            kwargs=body.template_kwargs(),
        )
        tool_call_parser, reasoning_parser = server.parsers
        needs_special = needs_special_tokens(
            tool_call_parser if tools else None, reasoning_parser, server.llm.tokenizer
        )
        generation = await Generation.start(
            server,
            request,
            call,
            token_ids,
            body.to_sampling_params(keep_special=needs_special),
            cache_salt=body.cache_salt or "",
            request_id=f"chatcmpl-{uuid4().hex}",
            is_streamed=bool(body.stream),
            needs_pieces=bool(body.stream) or (body.may_call_tools and body.parallel_tool_calls is False),
        )
        return cls(server, body, generation, prompt)

    async def whole(self) -> ChatCompletion:
        """Waits for all choices. Raises what `Generation.deltas` does."""
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                self._read(delta)
        return ChatCompletion.model_validate(
            self._fields("chat.completion")
            | {
                "choices": [
                    {
                        "index": index,
                        "message": reply.message(),
                        "logprobs": self._logprobs(reply.logprobs),
                        "finish_reason": reply.finish_reason,
                        "stop_reason": reply.stop_reason,
                    }
                    for index, reply in enumerate(self._replies)
                ],
                "usage": Usage.of([self._generation]),
            }
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks as server-sent events; those of one step together. Raises what `Generation.deltas` does."""
        include_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        writer = ChunkWriter(self._fields("chat.completion.chunk"), include_usage=include_usage)
        begun = [False] * len(self._replies)
        plain_heads = [b'{"index":%d,"delta":{"content":' % index for index in range(len(self._replies))]
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                index = delta.index
                if not begun[index]:
                    begun[index] = True
                    first = writer.chunk(_choice(index, {"role": "assistant", "content": ""}))
                    yield first + self._chunks(writer, delta)
                elif self._replies[index].is_plain and delta.logprobs is None and delta.finish_reason is None:
                    if delta.text:
                        yield writer.chunk(plain_heads[index] + encode_json(delta.text) + _PLAIN_CHUNK_TAIL)
                elif chunks := self._chunks(writer, delta):
                    yield chunks
        yield (writer.usage(Usage.of([self._generation])) if include_usage else b"") + DONE

    def _chunks(self, writer: ChunkWriter, delta: OutputDelta) -> bytes:
        """Of one delta in general: a chunk for each part, and one for the finish reason."""
        reply, choices = self._replies[delta.index], []
        parts = self._read(delta)
        # Log-probabilities are of tokens, which know nothing of parts: they go with the first.
        if reply.logprobs and (parts or reply.finish_reason is not None):
            logprobs, reply.logprobs = self._logprobs(reply.logprobs), []
        else:
            logprobs = None
        if logprobs is not None and not parts:
            parts = [ContentPart("")]
        for number, part in enumerate(parts):
            choices.append(_choice(delta.index, _delta_of(part), logprobs=logprobs if number == 0 else None))
        if reply.finish_reason is not None:
            choices.append(_choice(delta.index, {}, finish_reason=reply.finish_reason, stop_reason=reply.stop_reason))
        return b"".join(map(writer.chunk, choices))

    def _read(self, delta: OutputDelta) -> list[ReplyPart]:
        reply = self._replies[delta.index]
        parts = reply.read(delta)
        if reply.finish_reason is not None:
            self._generation.complete(delta.index)
        return parts

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = chat_logprobs(self._llm.token_text, logprobs, self._body.top_logprobs or 0)
        return {"content": content, "refusal": None}


class _Reply:
    """What one choice has said so far."""

    def __init__(self, parser: ReplyParser | None) -> None:
        self.is_plain = parser is None
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def read(self, delta: OutputDelta) -> list[ReplyPart]:
        """The new parts, which are also kept for `message`."""
        self.logprobs += delta.logprobs or ()
        parts: list[ReplyPart]
        if self._parser is None:
            parts = [ContentPart(delta.text)] if delta.text else []
        else:
            parts = self._parser.append(delta.text)
            if delta.finish_reason is not None:
                parts += self._parser.finish()
        for part in parts:
            self._keep(part)
        is_complete = self._parser is not None and self._parser.is_complete
        if delta.finish_reason is not None or is_complete:
            calls_tools = self._calls and (is_complete or delta.finish_reason == "stop")
            self.finish_reason = "tool_calls" if calls_tools else delta.finish_reason
            self.stop_reason = delta.stop_reason
        return parts

    def message(self) -> dict[str, Any]:
        """The fields of an `AnsweredMessage`."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = self._calls
        return message

    def _keep(self, part: ReplyPart) -> None:
        match part:
            case ContentPart(text):
                self._content.append(text)
            case ReasoningPart(text):
                self._reasoning.append(text)
            case ToolCallStart(_, id_, name):
                self._calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
            case ToolCallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text


def _parser(server: "Server", body: ChatRequest, prompt: str) -> ReplyParser | None:
    """None where there is nothing to be found."""
    tool_call_parser, reasoning_parser = server.parsers
    if reasoning_parser is None and not body.may_call_tools:
        return None
    return make_reply_parser(
        tool_call_parser,
        reasoning_parser,
        tools_allowed=body.may_call_tools,
        prompt=prompt,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _messages(body: ChatRequest) -> list[dict[str, Any]]:
    messages = []
    for number, message in enumerate(body.messages):
        try:
            messages.append(message.for_template())
        except ValueError as error:
            place = f"messages[{number}]"
            raise ApiError(400, f"{place}: {error}", param=place, logged=f"{place} is not what it must be") from None
    return messages


def _delta_of(part: ReplyPart) -> dict[str, Any]:
    match part:
        case ContentPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id_, name):
            call = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _choice(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return encode_json(choice if finish_reason is None else choice | {"stop_reason": stop_reason})
