"""/v1/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxllm.server.api.answers.completion_answer import CompletionAnswer
from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.call import CALL_HEADERS, CallDep
from jaxllm.server.api.json_body import json_response
from jaxllm.server.api.protocol.completions import Completion, CompletionRequest
from jaxllm.server.api.server import server_of

router = APIRouter()


@router.post(
    "/v1/completions",
    tags=["generation"],
    response_model=Completion,
    responses=EVENT_STREAM,
    openapi_extra=CALL_HEADERS,
)
async def create_completion(body: CompletionRequest, request: Request, call: CallDep) -> Response:
    """Continues prompts."""
    server = server_of(request)
    body.model = server.check_model(body.model)
    answer = await CompletionAnswer.start(server, request, call.with_body(body), body)
    if body.stream:
        return await EventStream.start(answer.source, answer, keep_alive_s=server.config.stream_keep_alive_s)
    return json_response(await answer.whole())
