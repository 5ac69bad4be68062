"""What a request of /v1/responses gives the model to read: its input, behind the conversation that it continues."""

from typing import TYPE_CHECKING, Any

from jaxllm import Conversation
from jaxllm.server.api.errors import ApiError, shown
from jaxllm.server.api.keys import Caller
from jaxllm.server.api.protocol.responses import InputTokensRequest
from jaxllm.server.api.response_store import StoredResponse

if TYPE_CHECKING:
    from jaxllm.server.api.server import Server


class ResponseInput:
    """conversation: without the instructions, which are of this request only.
    messages: with them, for the chat template.

    Raises ApiError: there is no such earlier response, or it cannot be continued, or an item does not fit.
    """

    def __init__(self, server: "Server", caller: Caller, body: InputTokensRequest) -> None:
        self.conversation = Conversation(_earlier_messages(server, caller, body.previous_response_id))
        try:
            body.add_to(self.conversation)
        except ValueError as error:
            raise ApiError(400, str(error), param="input") from error
        instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        self.messages: list[dict[str, Any]] = [*instructions, *self.conversation.messages]
        if not self.messages:
            raise ApiError(400, "there is nothing to read; give input, instructions or previous_response_id")


def find_response(server: "Server", caller: Caller, response_id: str, *, param: str = "response_id") -> StoredResponse:
    """Raises ApiError 404: the caller's tenant has no such response."""
    stored = server.responses.get(caller.tenant, response_id)
    if stored is not None:
        return stored
    if limit := server.responses.max_responses:
        kept = f"the {limit:,} used last are kept, unless they had store: false"
    else:
        kept = "this server keeps none (--max-stored-responses 0)"
    raise ApiError(
        404, f"there is no response {shown(response_id)} here; {kept}", param=param, code="response_not_found"
    )


def _earlier_messages(server: "Server", caller: Caller, response_id: str | None) -> list[dict[str, Any]]:
    if response_id is None:
        return []
    stored = find_response(server, caller, response_id, param="previous_response_id")
    status = stored.response["status"]
    if status not in ("completed", "incomplete"):
        raise ApiError(
            400,
            f"response {response_id!r} is {status}; a conversation goes on from one that is completed or incomplete",
            param="previous_response_id",
        )
    return stored.messages
