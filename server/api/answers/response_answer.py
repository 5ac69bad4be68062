"""The answer of /v1/responses: whole, in events, or in the background."""

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from fastapi import Request

from jaxllm import Conversation, OutputDelta, SamplingParams
from jaxllm.server.api.answers.reply import Reply, start_replies
from jaxllm.server.api.answers.response_builder import ResponseBuilder
from jaxllm.server.api.call import Call
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.deltas import deltas
from jaxllm.server.api.keys import Caller
from jaxllm.server.api.prompts.response_input import ResponseInput
from jaxllm.server.api.protocol.responses import ResponseRequest
from jaxllm.server.api.response_store import StoredResponse

if TYPE_CHECKING:
    from jaxllm.server.api.server import Server

logger = logging.getLogger("jaxllm.server")

ID_PREFIX = "resp_"
_in_background: set[asyncio.Task[None]] = set()  # The event loop itself does not keep tasks alive.


class ResponseAnswer:
    """A response, while the engine makes it: `whole`, in the background, or the writer of its stream (`EventWriter`).

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
    async def start(cls, server: "Server", request: Request, call: Call, body: ResponseRequest) -> "ResponseAnswer":
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

    def continue_in_background(self) -> dict[str, Any]:
        """The response as it is now; the whole one can be had from the store. Raises ApiError if that is full."""
        if not self._store():
            self.generation.close()
            message = "the response could not be kept to be asked for later; the server's log says why"
            raise ApiError(500, message, should_retry=False)
        task = asyncio.create_task(self._complete())
        _in_background.add(task)
        task.add_done_callback(_in_background.discard)
        return self._builder.response

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
        "id": f"{ID_PREFIX}{secrets.token_hex(16)}",
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
