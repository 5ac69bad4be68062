"""The conversation of /v1/messages, as the chat template gets it."""

from typing import TYPE_CHECKING, Any

from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.protocol.messages import CountTokensRequest

if TYPE_CHECKING:
    from jaxllm.server.api.server import Server


def messages_of(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Raises ApiError 400 for a message that does not fit."""
    try:
        return body.messages_for_template()
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def template_kwargs(server: "Server", body: CountTokensRequest) -> dict[str, Any]:
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
