"""The messages of chat completions, as the chat template gets them."""

from collections.abc import Sequence
from typing import Any

from jaxllm import Conversation
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.protocol.chat_completions import Message

_CHANGE_NOTHING = {"parsed", "refusal", "annotations", "audio", "function_call"}


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises ApiError 400 naming the message that does not fit."""
    conversation = Conversation()
    for number, message in enumerate(messages):
        try:
            conversation.add(message.model_dump(exclude_none=True, exclude=_CHANGE_NOTHING))
        except ValueError as error:
            place = f"messages[{number}]"
            raise ApiError(400, f"{place}: {error}", param=place, logged=f"{place} is not what it must be") from None
    return conversation.messages
