"""/v1/messages."""

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from jaxllm import OutputDelta
from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.answers.message_builder import MessageBuilder
from jaxllm.server.api.answers.reply import Reply, check_tools, start_replies
from jaxllm.server.api.answers.streaming import encode_json
from jaxllm.server.api.call import CALL_HEADERS, Call, read_call
from jaxllm.server.api.errors import ApiError, blamed_as
from jaxllm.server.api.generation.deltas import deltas
from jaxllm.server.api.keys import authenticate
from jaxllm.server.api.protocol.messages import AnsweredMessage, CountTokensRequest, MessagesRequest, TokensCount

if TYPE_CHECKING:
    from jaxllm.server.http.app import Server

router = APIRouter(tags=["generation"])


@router.post("/v1/messages", response_model=AnsweredMessage, responses=EVENT_STREAM, openapi_extra=CALL_HEADERS)
async def create_message(
    body: MessagesRequest, request: Request, call: Annotated[Call, Depends(read_call)]
) -> Response:
    """Answers a conversation, in the form of Anthropic's API."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    with blamed_as(body.param_names):
        (reply,) = await start_replies(
            server,
            request,
            call.with_priority(body.priority),
            _messages(body),
            body.to_sampling_params(),
            tools=body.tools_for_template(),
            template_kwargs=_template_kwargs(server, body),
            parallel_tool_calls=body.parallel_tool_calls,
            cache_salt=body.cache_salt or "",
            is_streamed=bool(body.stream),
        )
    answer = _Answer(body.model, reply, call.request_id)
    if body.stream:
        return await EventStream.start(reply.generation, answer, keep_alive_s=server.config.stream_keep_alive_s)
    return Response(encode_json(await answer.whole()), media_type="application/json")


@router.post("/v1/messages/count_tokens", dependencies=[Depends(authenticate)])
async def count_tokens(body: CountTokensRequest, request: Request) -> TokensCount:
    """How many tokens a prompt of /v1/messages has."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    tools = body.tools_for_template()
    kwargs = _template_kwargs(server, body)
    with blamed_as(body.param_names):
        _, token_ids = await server.templates.render(_messages(body), tools=tools or None, kwargs=kwargs)
    check_tools(server, tools)
    return TokensCount(input_tokens=len(token_ids))


class _Answer:
    """One message under way: `whole`, or the writer of its stream (`EventWriter`)."""

    def __init__(self, model: str, reply: Reply, request_id: str) -> None:
        self._reply = reply
        self._generation = reply.generation
        self._builder = MessageBuilder(model, request_id)

    async def whole(self) -> dict[str, Any]:
        """Waits for the end. Raises what `Generation.take` does."""
        async for delta in deltas(self._generation):
            self.add(delta)
        await self.end()
        return self._builder.message

    def begin(self) -> bytes:
        return self._builder.begin(self._generation.num_prompt_tokens)

    def add(self, delta: OutputDelta) -> bytes:
        return self._builder.add(self._reply.read(delta))

    async def end(self) -> bytes:
        return self._builder.end(
            self._reply.finish_reason,
            self._reply.stop_reason,
            num_prompt_tokens=self._generation.num_prompt_tokens,
            num_cached_tokens=self._generation.num_cached_tokens,
            num_output_tokens=self._generation.num_output_tokens,
        )

    def fail(self, error: ApiError) -> bytes:
        return self._builder.fail(error)


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    try:
        return body.messages_for_template()
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def _template_kwargs(server: "Server", body: CountTokensRequest) -> dict[str, Any]:
    """Raises ApiError 400 if the model thinks and cannot be told not to."""
    kwargs = body.template_kwargs()
    if body.thinking is None:
        return kwargs
    wants_thinking = body.thinking.type == "adaptive"
    if server.templates.reads("enable_thinking"):
        return {"enable_thinking": wants_thinking, **kwargs}
    if server.parsers[1] is not None and not wants_thinking:
        raise ApiError(400, "thinking cannot be disabled: this model's chat template has no choice", param="thinking")
    return kwargs
