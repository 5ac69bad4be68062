"""The model's reply to a conversation, taken apart into reasoning, content and tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import Request

from jaxllm import OutputDelta, SamplingParams
from jaxllm.server.api.call import Call
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.generation import Generation
from jaxllm.server.api.parsers import (
    TOOL_CALL_PARSERS,
    ContentPart,
    ReasoningPart,
    ReplyParser,
    ReplyPart,
    ToolCallStart,
    make_reply_parser,
    needs_special_tokens,
)

if TYPE_CHECKING:
    from jaxllm.server.api.server import Server


class Reply:
    """One choice of a generation, as far as it has been read.

    generation: what the engine does for it, and for the other choices.
    prompt_token_ids: of the conversation.
    finish_reason: "stop" or "length", when it has ended.
    stop_reason: as in OutputDelta.
    has_calls: whether it has called a tool.
    is_plain: whether its parts are its text, of which nothing is held back.
    """

    def __init__(
        self, server: "Server", generation: Generation, parser: ReplyParser | None, prompt_token_ids: list[int]
    ) -> None:
        """`parser`: None where there is nothing to be found."""
        self.generation = generation
        self.prompt_token_ids = prompt_token_ids
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_calls = False
        self.is_plain = parser is None
        self._encoder = server.encoder
        self._parser = parser
        self._reasoning: list[str] = []

    def read(self, delta: OutputDelta) -> list[ReplyPart]:
        """The new parts; seldom none. When it has what was asked for, the generation hears that this choice is
        complete."""
        if self._parser is None:
            parts: list[ReplyPart] = [ContentPart(delta.text)] if delta.text else []
        else:
            parts = self._parser.append(delta.text)
            if delta.finish_reason is not None:
                parts += self._parser.finish()
            for part in parts:
                if isinstance(part, ReasoningPart):
                    self._reasoning.append(part.text)
                self.has_calls |= isinstance(part, ToolCallStart)
        if self._parser is not None and self._parser.is_complete:
            self.finish_reason = "stop"
            self.generation.complete(delta.index)
        else:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        return parts

    def rest(self) -> list[ReplyPart]:
        """What was held back, of a reply that has been cut off."""
        return self._parser.finish() if self._parser is not None else []

    async def num_reasoning_tokens(self) -> int:
        """How many tokens its reasoning is, without the markers around it."""
        text = "".join(self._reasoning)
        return len(await self._encoder.encode(text, add_special_tokens=False)) if text else 0


async def start_replies(
    server: "Server",
    http_request: Request,
    call: Call,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    parallel_tool_calls: bool = True,
    request_id: str | None = None,
    is_streamed: bool = False,
) -> list[Reply]:
    """Gives a conversation to the engine, and returns when that has taken it in: a reply for each choice, all of one
    generation.

    Args:
      messages, tools, template, template_kwargs, add_generation_prompt, continue_final_message, add_special_tokens: as
        `ChatTemplates.render` takes them.
      parallel_tool_calls: if False, a reply ends with its first call.

    Raises what `ChatTemplates.render` and `Generation.start` do, and ApiError 400 for tools whose calls nobody would
    find.
    """
    prompt, token_ids = await server.templates.render(
        messages,
        tools=tools or None,
        template=template,
        kwargs=template_kwargs or {},
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
    )
    check_tools(server, tools)
    tool_call_parser, reasoning_parser = server.parsers
    if needs_special_tokens(tool_call_parser if tools else None, reasoning_parser, server.llm.tokenizer):
        params = replace(params, skip_special_tokens=False)
    generation = await Generation.start(
        server,
        http_request,
        call,
        token_ids,
        params,
        request_id=request_id,
        is_streamed=is_streamed,
        needs_pieces=is_streamed or (bool(tools) and not parallel_tool_calls),
    )

    def parser() -> ReplyParser | None:
        if reasoning_parser is None and not tools:
            return None
        return make_reply_parser(
            tool_call_parser,
            reasoning_parser,
            tools_allowed=bool(tools),
            prompt=prompt,
            said=messages[-1]["content"] if continue_final_message else "",
            parallel_tool_calls=parallel_tool_calls,
        )

    return [Reply(server, generation, parser(), token_ids) for _ in range(params.n)]


def check_tools(server: "Server", tools: Sequence[Any]) -> None:
    """Raises ApiError 400 if calls of these tools, of which the template tells the model, would not be found in the
    model's text."""
    if not tools or server.parsers[0] is not None:
        return
    if server.config.tool_call_parser is None:
        message = (
            "this server looks for no tool calls (--tool-call-parser none); leave tools out, or start it without that "
            "option"
        )
    else:
        known = ", ".join(TOOL_CALL_PARSERS)
        message = (
            f"this model's chat template writes tool calls in none of the known formats ({known}), so that none would "
            "be found in its text; leave tools out, or start the server with --tool-call-parser and one of them"
        )
    raise ApiError(400, message, param="tools")
