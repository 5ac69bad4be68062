"""/v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxllm.server.api.answers.chat_answer import ChatAnswer
from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.call import CALL_HEADERS, CallDep
from jaxllm.server.api.errors import blamed_as
from jaxllm.server.api.json_body import json_response
from jaxllm.server.api.protocol.chat_completions import ChatCompletion, ChatRequest
from jaxllm.server.api.server import server_of

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    response_model=ChatCompletion,
    responses=EVENT_STREAM,
    openapi_extra=CALL_HEADERS,
)
async def create_chat_completion(body: ChatRequest, request: Request, call: CallDep) -> Response:
    """Answers a conversation."""
    server = server_of(request)
    body.model = server.check_model(body.model)
    with blamed_as(body.param_names):
        answer = await ChatAnswer.start(server, request, call.with_body(body), body)
    if body.stream:
        return await EventStream.start(answer.generation, answer, keep_alive_s=server.config.stream_keep_alive_s)
    return json_response(await answer.whole())
