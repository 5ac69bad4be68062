"""/v1/responses."""

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from fastapi import APIRouter, Depends, Query, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from jaxllm import Conversation, OutputDelta, SamplingParams
from jaxllm.server.api.answers.event_stream import EVENT_STREAM, EventStream
from jaxllm.server.api.answers.reply import Reply, check_tools, start_replies
from jaxllm.server.api.answers.response_builder import ResponseBuilder
from jaxllm.server.api.answers.streaming import encode_json
from jaxllm.server.api.call import CALL_HEADERS, Call, read_call
from jaxllm.server.api.errors import ApiError, blamed_as
from jaxllm.server.api.generation.deltas import deltas
from jaxllm.server.api.keys import Caller, authenticate
from jaxllm.server.api.prompts.response_input import ResponseInput, find_response
from jaxllm.server.api.protocol.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ResponseObject,
    ResponseRequest,
)
from jaxllm.server.api.response_store import StoredResponse

if TYPE_CHECKING:
    from jaxllm.server.http.app import Server

logger = logging.getLogger("jaxllm.server")
router = APIRouter(tags=["generation"])

_CANCEL_TIMEOUT_S = 10.0
_POLL_S = 0.01
_ID_PREFIX = "resp_"
_in_background: set[asyncio.Task[None]] = set()  # The event loop itself does not keep tasks alive.


class _ResponseId(StringConvertor):
    """Other paths under /v1/responses, which OpenAI's API may have and this server has not, are no responses."""

    regex = f"{_ID_PREFIX}[^/]+"


register_url_convertor("response_id", _ResponseId())


@router.post("/v1/responses", response_model=ResponseObject, responses=EVENT_STREAM, openapi_extra=CALL_HEADERS)
async def create_response(
    body: ResponseRequest, request: Request, call: Annotated[Call, Depends(read_call)]
) -> Response:
    """Answers a conversation, which may go on from an earlier response."""
    server: Server = request.app.state.server
    body.model = server.check_model(body.model)
    if body.background:
        request = Request(request.scope, _never)  # The client leaves, and the answer is made nevertheless.
    with blamed_as(body.param_names):
        answer = await _Answer.start(server, request, call.with_priority(body.priority), body)
    if body.stream:
        return await EventStream.start(answer.generation, answer, keep_alive_s=server.config.stream_keep_alive_s)
    if body.background:
        return answer.continue_in_background()
    return _json(await answer.whole())


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: InputTokensRequest, request: Request, caller: Annotated[Caller, Depends(authenticate)]
) -> InputTokens:
    """How many tokens a request of /v1/responses gives the model to read."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    messages, tools = ResponseInput(server, caller, body).messages, body.tools_for_template()
    with blamed_as(body.param_names):
        _, token_ids = await server.templates.render(messages, tools=tools or None, kwargs=body.template_kwargs())
    check_tools(server, tools)
    return InputTokens(object="response.input_tokens", input_tokens=len(token_ids))


@router.get("/v1/responses/{response_id:response_id}", response_model=ResponseObject)
async def get_response(
    response_id: str,
    request: Request,
    caller: Annotated[Caller, Depends(authenticate)],
    stream: Annotated[bool, Query(description="Not supported: must be false.")] = False,
    starting_after: Annotated[int | None, Query(description="Not supported.")] = None,
    include: Annotated[list[str] | None, Query(description="Not supported.")] = None,
) -> Response:
    """A response that was stored, or is being made in the background."""
    for name, value in {"stream": stream, "starting_after": starting_after, "include": include}.items():
        if value:
            raise ApiError(400, f"{name} is not supported here: events can be had only while they happen", param=name)
    return _json(find_response(request.app.state.server, caller, response_id).response)


@router.delete("/v1/responses/{response_id:response_id}")
async def delete_response(
    response_id: str, request: Request, caller: Annotated[Caller, Depends(authenticate)]
) -> DeletedResponse:
    """Forgets a response. Those that went on from it stay as they are."""
    server: Server = request.app.state.server
    if find_response(server, caller, response_id).response["status"] == "in_progress":
        raise ApiError(400, f"response {response_id!r} is still being made; cancel it first", param="response_id")
    server.responses.delete(caller.tenant, response_id)
    return DeletedResponse(id=response_id, object="response.deleted", deleted=True)


@router.post("/v1/responses/{response_id:response_id}/cancel", response_model=ResponseObject)
async def cancel_response(
    response_id: str, request: Request, caller: Annotated[Caller, Depends(authenticate)]
) -> Response:
    """Ends a response that is being made in the background. One that has ended stays as it is."""
    server: Server = request.app.state.server
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
    return _json(response)


class _Answer:
    """One response under way: `whole`, in the background, or the writer of its stream (`EventWriter`).

    generation: what the engine does for it.
    """

    def __init__(
        self,
        server: "Server",
        caller: Caller,
        conversation: Conversation,
        reply: Reply,
        builder: ResponseBuilder,
    ) -> None:
        self.generation = reply.generation
        self._builder = builder
        self._server = server
        self._caller = caller
        self._conversation = conversation
        self._reply = reply

    @classmethod
    async def start(cls, server: "Server", request: Request, call: Call, body: ResponseRequest) -> "_Answer":
        """Returns when the engine has taken the request in. Raises ApiError and InvalidRequestError if it cannot."""
        input_ = ResponseInput(server, call.caller, body)
        params = body.to_sampling_params()
        response = _new_response(server, body, params)
        (reply,) = await start_replies(
            server,
            request,
            call,
            input_.messages,
            params,
            tools=body.tools_for_template(),
            template_kwargs=body.template_kwargs(),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            cache_salt=body.cache_salt or "",
            request_id=response["id"],
            is_streamed=bool(body.stream),
        )
        return cls(server, call.caller, input_.conversation, reply, ResponseBuilder(response))

    async def whole(self) -> dict[str, Any]:
        """Waits for the end. Raises what `Generation.take` does."""
        self.begin()
        async for delta in deltas(self.generation):
            self.add(delta)
        await self.end()
        return self._builder.response

    def begin(self) -> bytes:
        return self._builder.begin()

    def add(self, delta: OutputDelta) -> bytes:
        return self._builder.add(self._reply.read(delta))

    async def end(self) -> bytes:
        events = self._builder.end(self._reply.finish_reason, await self._usage())
        self._store()
        return events

    def fail(self, error: ApiError) -> bytes:
        events = self._builder.fail(error)
        self._store()
        return events

    def continue_in_background(self) -> Response:
        """The answer now; the response itself can be had from the store. Raises ApiError if that is full."""
        if not self._store():
            self.generation.close()
            message = "the response could not be kept to be asked for later; the server's log says why"
            raise ApiError(500, message, should_retry=False)
        task = asyncio.create_task(self._complete())
        _in_background.add(task)
        task.add_done_callback(_in_background.discard)
        return _json(self._builder.response)

    async def _complete(self) -> None:
        try:
            await self.whole()
        except Exception as error:
            known = ApiError.of(error)
            if known.status == 500:
                logger.error("response %s failed in the background", self._builder.response["id"], exc_info=error)
            self._builder.add(self._reply.rest())
            self._builder.response["usage"] = await self._usage()
            if known.code == "request_aborted":
                self._builder.cancel()
            else:
                self._builder.fail(known)
            self._store()

    async def _usage(self) -> dict[str, Any]:
        generation = self.generation
        return {
            "input_tokens": generation.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": generation.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": await self._reply.num_reasoning_tokens()},
            "total_tokens": generation.num_prompt_tokens + generation.num_output_tokens,
        }

    def _store(self) -> bool:
        """Keeps it as it is now, if it is to be kept. False if it cannot be."""
        response = self._builder.response
        if not response["store"]:
            return True
        conversation = Conversation(self._conversation.messages)
        self._builder.add_to(conversation)
        stored = StoredResponse(response=response, messages=conversation.messages)
        return self._server.responses.put(self._caller.tenant, stored)


def _new_response(server: "Server", body: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """A response without output. Raises ApiError 400 if it is to be stored and this server stores none."""
    can_store = server.responses.max_responses > 0
    if not can_store and (body.store or body.background):
        field = "store" if body.store else "background"
        raise ApiError(
            400, f"{field} is true, and this server keeps no responses (--max-stored-responses 0)", param=field
        )
    effort = body.reasoning.effort if body.reasoning else None
    return {
        "id": f"{_ID_PREFIX}{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": body.model,
        "output": [],
        "usage": None,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "background": bool(body.background),
        "store": can_store and body.store is not False,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "tools": [tool.model_dump(by_alias=True, exclude_none=True) | {"strict": False} for tool in body.tools or ()],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
    }


def _json(response: dict[str, Any]) -> Response:
    return Response(encode_json(response), media_type="application/json")


async def _never() -> NoReturn:
    """What a connection receives that nobody closes."""
    await asyncio.Event().wait()
    raise AssertionError
