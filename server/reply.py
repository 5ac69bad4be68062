"""The model's answer to a conversation, taken apart into reasoning, content and tool calls."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import Request

from jaxllm import SamplingParams
from jaxllm.server.api_errors import ApiError
from jaxllm.server.call import Call
from jaxllm.server.generation import Generation
from jaxllm.server.parsers import ReplyParser, ReplyPart, make_reply_parser, needs_special_tokens

if TYPE_CHECKING:
    from jaxllm.server.app import Server


class Reply:
    """One answer under way.

    generation: what the engine does for it.
    finish_reason, stop_reason: as in OutputDelta, when `parts` has ended.
    """

    def __init__(self, generation: Generation, parser: ReplyParser) -> None:
        self.generation = generation
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._parser = parser

    @classmethod
    async def start(
        cls,
        server: "Server",
        http_request: Request,
        call: Call,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        cache_salt: str = "",
        request_id: str | None = None,
        is_streamed: bool = False,
    ) -> "Reply":
        """Returns when the engine has taken the request in.

        Args:
          messages, tools, template_kwargs: as `ChatTemplates.render` takes them.
          parallel_tool_calls: if False, the answer ends with its first call.

        Raises what `ChatTemplates.render` and `Generation.start` do, and ApiError 400 for tools whose calls nobody
        would find.
        """
        tool_call_parser, reasoning_parser = server.parsers
        check_tools(server, tools)
        prompt, token_ids = await server.templates.render(messages, tools=tools or None, kwargs=template_kwargs or {})
        if needs_special_tokens(tool_call_parser if tools else None, reasoning_parser, server.llm.tokenizer):
            params = replace(params, skip_special_tokens=False)
        parser = make_reply_parser(
            tool_call_parser,
            reasoning_parser,
            tools_allowed=bool(tools),
            prompt=prompt,
            parallel_tool_calls=parallel_tool_calls,
        )
        generation = await Generation.start(
            server,
            http_request,
            call,
            token_ids,
            params,
            cache_salt=cache_salt,
            request_id=request_id,
            is_streamed=is_streamed,
            needs_pieces=is_streamed or not parallel_tool_calls,
        )
        return cls(generation, parser)

    async def parts(self) -> AsyncIterator[list[ReplyPart]]:
        """What is new, as it comes; seldom nothing. Raises what `Generation.deltas` does."""
        async for delta in self.generation.deltas():
            parts = self._parser.append(delta.text)
            if self._parser.is_complete:
                self.finish_reason = "stop"
                self.generation.complete(delta.index)
            elif delta.finish_reason is not None:
                self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
                parts += self._parser.finish()
            yield parts


def check_tools(server: "Server", tools: Sequence[Any]) -> None:
    """Raises ApiError 400 if calls of these tools would not be found in the model's text."""
    if tools and server.parsers[0] is None:
        raise ApiError(
            400,
            "this server cannot tell this model's tool calls from its text; leave tools out, or start the server with "
            "--tool-call-parser",
            param="tools",
        )
