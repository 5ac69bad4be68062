"""A conversation as chat templates read it, put together from whole messages or from the finer pieces of APIs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_MAX_SHOWN = 8  # ids in a message
_FOREIGN = ("refusal", "annotations", "audio", "function_call")  # of OpenAI's answers; in ours they are empty


class Conversation:
    """Appends to `messages`, which every way to the model's chat template goes through: the same conversation becomes
    the same tokens whoever brings it.

    A whole message comes by `add`. Of the finer pieces of other APIs, what an assistant thinks, says and calls in one
    turn becomes one message. The result of a call must follow that call; a call need not have one.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]] | None = None) -> None:
        """messages: an earlier conversation that goes on; it is copied."""
        self.messages: list[Message] = [dict(message) for message in messages or ()]
        calls = [call for message in self.messages for call in message.get("tool_calls") or ()]
        self._names: dict[str, str] = {call["id"]: call["function"]["name"] for call in calls}
        self._turn: Message | None = None  # the assistant's message that is being put together

    def add(self, message: Mapping[str, Any]) -> None:
        """A message of chat completions, as OpenAI's API and transformers have it.

        Content may be a text or a list of text parts, which are joined by newlines; an assistant may say nothing.
        Arguments of calls may be a text or an object; `reasoning` is `reasoning_content`. What else a message has goes
        to the template, but for None.

        Raises ValueError for what does not fit.
        """
        fields = {name: value for name, value in message.items() if value is not None}
        role = fields.pop("role", None)
        if not isinstance(role, str):
            raise ValueError(f"role is {role!r}; it must be a text such as user")
        for name in _FOREIGN:
            if fields.pop(name, None):
                raise ValueError(f"it has {name}, which is not supported")
        if "content" not in fields and role != "assistant":
            raise ValueError("content is missing")
        reasoning = fields.pop("reasoning", None)  # vLLM's name
        if reasoning is not None and fields.setdefault("reasoning_content", reasoning) != reasoning:
            raise ValueError("reasoning and reasoning_content differ; they are two names of one thing")
        content, calls = _text_of(fields.pop("content", "")), fields.pop("tool_calls", ())
        if calls and role != "assistant":
            raise ValueError(f"a message of the role {role} has no tool_calls")
        if role == "tool":
            self.result(fields.pop("tool_call_id", None), content)
        else:
            self.say(role, content)
        self.messages[-1] |= fields
        self._turn = self.messages[-1]
        for number, call in enumerate(calls):
            try:
                self.call(call["id"], call["function"]["name"], call["function"].get("arguments"))
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"tool_calls[{number}] must have an id, and a function with a name") from error
        self._turn = None

    def for_template(self, template: str) -> list[Message]:
        """The messages, as this template reads them: the role "developer", OpenAI's newer name for who says how to
        answer, becomes "system" in one that does not mention it."""
        renamed = {} if "developer" in template else {"developer": "system"}
        return [{**message, "role": renamed.get(message["role"], message["role"])} for message in self.messages]

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

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any] | None) -> None:
        """A tool that the assistant calls. Templates read arguments as an object; see `parse_arguments`."""
        parsed = dict(arguments) if isinstance(arguments, Mapping) else self.parse_arguments(arguments or "")
        function = {"name": name, "arguments": parsed}
        calls = self._open_turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    @staticmethod
    def parse_arguments(text: str) -> dict[str, Any]:
        """The arguments of a call as an object. Those that a model has got wrong, or that were cut off, are passed on
        as {"INVALID_JSON": text}, as Anthropic's API does: every template can show that, and the model sees its own
        words."""
        try:
            arguments = json.loads(text or "{}", parse_constant=_refuse)
            json.dumps(arguments, ensure_ascii=False).encode()  # Half of a character, which JSON can spell, is no text.
        except (ValueError, RecursionError):
            arguments = None
        return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}

    def result(self, call_id: Any, text: str) -> None:
        """What a call gave back. Raises ValueError: there was no such call."""
        if not isinstance(call_id, str):
            raise ValueError("a message of the role tool needs tool_call_id")
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


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"content is {content!r:.80}; it must be a text or a list of parts")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {number} of content must be {{"type": "text", "text": …}}; no other can be read')
        texts.append(part["text"])
    return "\n".join(texts)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
