"""The answer of /v1/messages, whole or in events."""

from typing import TYPE_CHECKING, Any

from fastapi import Request

from jaxllm import OutputDelta
from jaxllm.server.api.answers.message_builder import MessageBuilder
from jaxllm.server.api.answers.reply import Reply, start_replies
from jaxllm.server.api.call import Call
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.deltas import deltas
from jaxllm.server.api.prompts.message_input import messages_of, template_kwargs
from jaxllm.server.api.protocol.messages import MessagesRequest

if TYPE_CHECKING:
    from jaxllm.server.api.server import Server


class MessageAnswer:
    """A message, while the engine makes it: `whole`, or the writer of its stream (`EventWriter`).

    generation: what the engine does for it.
    """

    def __init__(self, model: str, reply: Reply, request_id: str) -> None:
        self.generation = reply.generation
        self._reply = reply
        self._builder = MessageBuilder(model, request_id)

    @classmethod
    async def start(cls, server: "Server", request: Request, call: Call, body: MessagesRequest) -> "MessageAnswer":
        """Returns when the engine has taken the request in. Raises what `start_replies` does."""
        (reply,) = await start_replies(
            server,
            request,
            call,
            messages_of(body),
            body.to_sampling_params(),
            tools=body.tools_for_template(),
            template_kwargs=template_kwargs(server, body),
            parallel_tool_calls=body.parallel_tool_calls,
            is_streamed=bool(body.stream),
        )
        return cls(body.model, reply, call.request_id)

    async def whole(self) -> dict[str, Any]:
        """Waits for the end. Raises what `Generation.take` does."""
        async for delta in deltas(self.generation):
            self.add(delta)
        await self.end()
        return self._builder.message

    def begin(self) -> bytes:
        return self._builder.begin(self.generation.num_prompt_tokens)

    def add(self, delta: OutputDelta) -> bytes:
        return self._builder.add(self._reply.read(delta))

    async def end(self) -> bytes:
        return self._builder.end(
            self._reply.finish_reason,
            self._reply.stop_reason,
            num_prompt_tokens=self.generation.num_prompt_tokens,
            num_cached_tokens=self.generation.num_cached_tokens,
            num_output_tokens=self.generation.num_output_tokens,
        )

    def fail(self, error: ApiError) -> bytes:
        return self._builder.fail(error)
