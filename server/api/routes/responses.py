"""/v1/responses."""

import asyncio
import time
from typing import Annotated, NoReturn

from fastapi import APIRouter, Query, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.answers.reply import check_tools
from jaxllm.server.api.answers.response_answer import ID_PREFIX, ResponseAnswer
from jaxllm.server.api.call import CALL_HEADERS, CallDep
from jaxllm.server.api.errors import ApiError, blamed_as
from jaxllm.server.api.json_body import json_response
from jaxllm.server.api.keys import CallerDep
from jaxllm.server.api.prompts.response_input import ResponseInput, find_response
from jaxllm.server.api.protocol.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ResponseObject,
    ResponseRequest,
)
from jaxllm.server.api.server import ServerDep, server_of

router = APIRouter(tags=["generation"])

_CANCEL_TIMEOUT_S = 10.0
_POLL_S = 0.01


class _ResponseId(StringConvertor):
    """Other paths under /v1/responses, which OpenAI's API may have and this server has not, are no responses."""

    regex = f"{ID_PREFIX}[^/]+"


register_url_convertor("response_id", _ResponseId())


@router.post("/v1/responses", response_model=ResponseObject, responses=EVENT_STREAM, openapi_extra=CALL_HEADERS)
async def create_response(body: ResponseRequest, request: Request, call: CallDep) -> Response:
    """Answers a conversation, which may go on from an earlier response."""
    server = server_of(request)
    body.model = server.check_model(body.model)
    if body.background:
        request = Request(request.scope, _never)  # The client leaves, and the answer is made nevertheless.
    with blamed_as(body.param_names):
        answer = await ResponseAnswer.start(server, request, call.with_body(body), body)
    if body.stream:
        return await EventStream.start(answer.generation, answer, keep_alive_s=server.config.stream_keep_alive_s)
    if body.background:
        return json_response(answer.continue_in_background())
    return json_response(await answer.whole())


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensRequest, server: ServerDep, caller: CallerDep) -> InputTokens:
    """How many tokens a request of /v1/responses gives the model to read."""
    server.check_model(body.model)
    messages, tools = ResponseInput(server, caller, body).messages, body.tools_for_template()
    with blamed_as(body.param_names):
        _, token_ids = await server.templates.render(messages, tools=tools or None, kwargs=body.template_kwargs())
    check_tools(server, tools)
    return InputTokens(object="response.input_tokens", input_tokens=len(token_ids))


@router.get("/v1/responses/{response_id:response_id}", response_model=ResponseObject)
async def get_response(
    response_id: str,
    server: ServerDep,
    caller: CallerDep,
    stream: Annotated[bool, Query(description="Not supported: must be false.")] = False,
    starting_after: Annotated[int | None, Query(description="Not supported.")] = None,
    include: Annotated[list[str] | None, Query(description="Not supported.")] = None,
) -> Response:
    """A response that was stored, or is being made in the background."""
    for name, value in {"stream": stream, "starting_after": starting_after, "include": include}.items():
        if value:
            raise ApiError(400, f"{name} is not supported here: events can be had only while they happen", param=name)
    return json_response(find_response(server, caller, response_id).response)


@router.delete("/v1/responses/{response_id:response_id}")
async def delete_response(response_id: str, server: ServerDep, caller: CallerDep) -> DeletedResponse:
    """Forgets a response. Those that went on from it stay as they are."""
    if find_response(server, caller, response_id).response["status"] == "in_progress":
        raise ApiError(400, f"response {response_id!r} is still being made; cancel it first", param="response_id")
    server.responses.delete(caller.tenant, response_id)
    return DeletedResponse(id=response_id, object="response.deleted", deleted=True)


@router.post("/v1/responses/{response_id:response_id}/cancel", response_model=ResponseObject)
async def cancel_response(response_id: str, server: ServerDep, caller: CallerDep) -> Response:
    """Ends a response that is being made in the background. One that has ended stays as it is."""
    response = find_response(server, caller, response_id).response
    if not response["background"]:
        raise ApiError(
            400,
            f"response {response_id!r} was not made in the background (background: true), and only such can be "
            "cancelled; to end another, close its connection",
            param="response_id",
        )
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    while response["status"] == "in_progress" and time.monotonic() < deadline:
        await server.llm.abort(response_id)
        await asyncio.sleep(_POLL_S)
        response = find_response(server, caller, response_id).response
    return json_response(response)


async def _never() -> NoReturn:
    """What a connection receives that nobody closes."""
    await asyncio.Event().wait()
    raise AssertionError
