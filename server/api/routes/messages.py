"""/v1/messages."""

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.answers.message_answer import MessageAnswer
from jaxllm.server.api.answers.reply import check_tools
from jaxllm.server.api.call import CALL_HEADERS, CallDep
from jaxllm.server.api.errors import blamed_as
from jaxllm.server.api.json_body import json_response
from jaxllm.server.api.keys import authenticate
from jaxllm.server.api.prompts.message_input import messages_of, template_kwargs
from jaxllm.server.api.protocol.messages import AnsweredMessage, CountTokensRequest, MessagesRequest, TokensCount
from jaxllm.server.api.server import ServerDep, server_of

router = APIRouter(tags=["generation"])


@router.post("/v1/messages", response_model=AnsweredMessage, responses=EVENT_STREAM, openapi_extra=CALL_HEADERS)
async def create_message(body: MessagesRequest, request: Request, call: CallDep) -> Response:
    """Answers a conversation, in the form of Anthropic's API."""
    server = server_of(request)
    server.check_model(body.model)
    with blamed_as(body.param_names):
        answer = await MessageAnswer.start(server, request, call.with_body(body), body)
    if body.stream:
        return await EventStream.start(answer.generation, answer, keep_alive_s=server.config.stream_keep_alive_s)
    return json_response(await answer.whole())


@router.post("/v1/messages/count_tokens", dependencies=[Depends(authenticate)])
async def count_tokens(body: CountTokensRequest, server: ServerDep) -> TokensCount:
    """How many tokens a prompt of /v1/messages has."""
    server.check_model(body.model)
    tools = body.tools_for_template()
    kwargs = template_kwargs(server, body)
    with blamed_as(body.param_names):
        _, token_ids = await server.templates.render(messages_of(body), tools=tools or None, kwargs=kwargs)
    check_tools(server, tools)
    return TokensCount(input_tokens=len(token_ids))
