"""A conversation as chat templates read it, put together from the finer pieces of other APIs."""

import json
from typing import Any

import msgspec

Message = dict[str, Any]

_MAX_SHOWN = 8  # ids in a message


class Conversation:
    """Appends to `messages`. What an assistant thinks, says and calls in one turn becomes one message."""

    def __init__(self, messages: list[Message] | None = None) -> None:
        """messages: an earlier conversation that goes on; it is copied."""
        self.messages: list[Message] = [dict(message) for message in messages or ()]
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        self._names: dict[str, str] = {call["id"]: call["function"]["name"] for call in calls}
        self._turn: Message | None = None  # the assistant's message that is being put together

    def say(self, role: str, text: str) -> None:
        """A message of the system or the user."""
        self._turn = None
        self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """The assistant's reasoning, before what it says or calls."""
        turn = self._new_turn() if self._turn else self._open_turn()
        turn["reasoning_content"] = text

    def answer(self, text: str) -> None:
        """What the assistant says."""
        turn = self._new_turn() if self._turn and self._turn["content"] else self._open_turn()
        turn["content"] = text

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """A tool that the assistant calls."""
        function = {"name": name, "arguments": arguments}
        calls = self._open_turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def result(self, call_id: str, text: str) -> None:
        """What a call gave back. Raises ValueError: there was no such call."""
        if call_id not in self._names:
            known = ", ".join(map(repr, list(self._names)[-_MAX_SHOWN:])) or "none"
            raise ValueError(f"there is no call {call_id[:80]!r} for this result; the last calls before it: {known}")
        self._turn = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": text})

    def _open_turn(self) -> Message:
        return self._turn or self._new_turn()

    def _new_turn(self) -> Message:
        self._turn = {"role": "assistant", "content": ""}
        self.messages.append(self._turn)
        return self._turn


def parsed_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object. Those that a model has got wrong are kept as {"INVALID_JSON": text},
    which is how Anthropic's API passes them on."""
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse)
        msgspec.json.encode(arguments)  # Half of a character, which JSON can spell, is no text.
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
