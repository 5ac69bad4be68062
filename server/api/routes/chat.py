"""/v1/chat/completions."""

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from jaxllm.server.api.answers.chat_answer import ChatAnswer
from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.answers.streaming import json_response
from jaxllm.server.api.call import CALL_HEADERS, Call, read_call
from jaxllm.server.api.errors import blamed_as
from jaxllm.server.api.protocol.chat import ChatCompletion, ChatRequest

if TYPE_CHECKING:
    from jaxllm.server.http.app import Server

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    response_model=ChatCompletion,
    responses=EVENT_STREAM,
    openapi_extra=CALL_HEADERS,
)
async def create_chat_completion(
    body: ChatRequest, request: Request, call: Annotated[Call, Depends(read_call)]
) -> Response:
    """Answers a conversation."""
    server: Server = request.app.state.server
    body.model = server.check_model(body.model)
    with blamed_as(body.param_names):
        answer = await ChatAnswer.start(server, request, call.with_priority(body.priority), body)
    if body.stream:
        return await EventStream.start(answer.generation, answer, keep_alive_s=server.config.stream_keep_alive_s)
    return json_response(await answer.whole())
