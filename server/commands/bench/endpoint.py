"""The two kinds of endpoint: what is sent to them, and what their streams say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxllm import JaxLLMError
from jaxllm.server.commands.bench.prompts import PROBES, TextPrompts
from jaxllm.server.commands.client.http_client import HttpClient
from jaxllm.server.commands.client.http_response import Response

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class AnswerError(JaxLLMError):
    """The server's answer is an error, or not what an OpenAI-compatible server says."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class Usage(msgspec.Struct):
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def num_cached_tokens(self) -> int:
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        if delta is None:
            return False
        return bool(delta.content or delta.reasoning_content or delta.reasoning) or len(delta.tool_calls) > 4


class Event(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        """Whether a token can be seen in it: not the chat's first event, which names the role only."""
        return any(choice.has_text for choice in self.choices)


read_event = msgspec.json.Decoder(Event).decode


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    extra: further fields of each request's body; they win over those made here.
    """

    kind: Literal["completions", "chat"]
    model: str
    ignore_eos: bool = True
    extra: Mapping[str, Any] | None = None

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    def body(self, prompt: str | list[int], output_len: int, *, stream: bool = True) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_len, "temperature": 0}
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | dict(self.extra or {}))

    async def calibrate(self, client: HttpClient) -> TextPrompts:
        """Asks the server how many tokens the probes have. Raises AnswerError, TransportError."""
        lens = []
        for probe in PROBES:
            response = await client.request("POST", self.path, self.body(probe, 1, stream=False))
            usage = _checked(response, self.path).usage
            if usage is None or not usage.prompt_tokens:
                raise AnswerError(
                    f"{client.url}{self.path} does not say how many tokens a prompt has (no usage.prompt_tokens), so "
                    "that texts of a wanted length cannot be made. Use --endpoint completions --token-ids."
                )
            lens.append(usage.prompt_tokens)
        if lens[1] <= lens[0]:
            raise AnswerError(f"{client.url} counts {lens[1]} tokens in {PROBES[1]!r} and {lens[0]} in {PROBES[0]!r}")
        return TextPrompts.calibrated(*lens)


async def first_model(client: HttpClient) -> str:
    """The first that the server names. Raises AnswerError, TransportError."""
    response = await client.request("GET", "/v1/models")
    try:
        if response.status == 200:
            return json.loads(response.body)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        pass
    raise AnswerError(f"{client.url}/v1/models names no model ({response.error_text}); give --model NAME")


def _checked(response: Response, path: str) -> Event:
    if response.status != 200:
        raise AnswerError(f"{path} answers {response.error_text}")
    try:
        return read_event(response.body)
    except msgspec.DecodeError as error:
        raise AnswerError(f"{path} does not answer as OpenAI's does: {error}") from error
