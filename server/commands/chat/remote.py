"""`jaxllm chat --url`: the conversation with a model at a server of OpenAI's API.

Needs the standard library only, so that it runs where no engine does.
"""

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from jaxllm import ConfigError, EngineConfig, JaxLLMError, SamplingParams
from jaxllm.server.commands.answer import Answer, AnswerStream, Message
from jaxllm.server.commands.chat.chat import Chat
from jaxllm.server.commands.client.http_response import Response, TransportError
from jaxllm.server.commands.client.sse_reader import SseReader
from jaxllm.server.commands.figures import Figures
from jaxllm.server.commands.options import options_from
from jaxllm.server.commands.terminal import note

TIMEOUT_S = 600.0
"""Without a byte from the server."""


class RefusedError(JaxLLMError):
    """The server answers with an error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --url and what belongs to it."""
    group = parser.add_argument_group("a model at a server, in place of MODEL")
    group.add_argument("--url", metavar="URL", help="of a server of OpenAI's API, such as http://localhost:8000")
    group.add_argument("--api-key", default="", metavar="KEY", help="or the environment variable JAXLLM_API_KEY")
    group.add_argument("--model-name", metavar="NAME", help="as the server names it (default: its first)")


def run(args: argparse.Namespace) -> int:
    """The conversation, until the user leaves."""
    if args.model is not None:
        args.parser.error("name either --url URL or MODEL (the server's name of a model is --model-name)")
    if engine_options := options_from(args, EngineConfig):
        name = next(iter(engine_options)).replace("_", "-")
        args.parser.error(f"--{name} is for an engine of this command; the one at --url has options of its own")
    options = options_from(args, SamplingParams)
    SamplingParams(**options)  # refuses what can be refused here
    model = RemoteModel(args.url, args.api_key or os.environ.get("JAXLLM_API_KEY", ""), args.model_name, options)
    note(f"{model.name} at {model.url}")
    figures = Figures()
    max_tokens = options.get("max_tokens")
    Chat(model.answer_to, figures, max_tokens=max_tokens, max_model_len=model.max_model_len, system=args.system).run()
    note(str(figures))
    return 0


class RemoteModel:
    """A model at a server.

    options: fields of each request, such as temperature; None is left to the server.

    Raises ConfigError, TransportError, RefusedError.
    """

    def __init__(self, url: str, api_key: str, name: str | None, options: dict[str, Any]) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the URL is {url!r}; it must be http://HOST:PORT or https://HOST:PORT")
        if not api_key.isascii() or not api_key.isprintable():
            raise ConfigError("the API key has characters that a header cannot have; it must be printable ASCII")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._options = {name: value for name, value in options.items() if value is not None}
        with self._open("/v1/models") as answer:
            try:
                models = {model["id"]: model for model in json.load(answer)["data"]}
                self.name: str = next(iter(models)) if name is None else name
            except (ValueError, KeyError, TypeError, StopIteration) as error:
                raise RefusedError(f"{self.url}/v1/models names no model; it is no server of OpenAI's API") from error
        if self.name not in models:
            raise ConfigError(f"--model-name is {self.name!r}; the server has {', '.join(map(repr, models))}")
        self.max_model_len: int | None = models[self.name].get("max_model_len")

    def answer_to(self, messages: list[Message]) -> AnswerStream:
        """The answer, piece by piece. Reasoning that the server tells apart goes to stderr."""
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        start, first, last = time.perf_counter(), None, 0.0
        finish_reason: str | None = None
        usage: dict[str, Any] = {}
        events = SseReader()
        with self._open("/v1/chat/completions", body | self._options) as answer:
            for line in _lines(answer, self.url):
                for data in events.feed(line):
                    if data == b"[DONE]":
                        continue
                    event = _read(data, self.url)
                    if error := event.get("error"):
                        raise RefusedError(error.get("message") if isinstance(error, dict) else str(error))
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        finish_reason = choice.get("finish_reason") or finish_reason
                        delta = choice.get("delta", {})
                        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                        if reasoning or delta.get("content"):
                            last = time.perf_counter()
                            first = first or last
                        if reasoning:
                            _show_reasoning(reasoning)
                        if text := delta.get("content"):
                            yield text
        if finish_reason is None:
            raise TransportError(f"{self.url} has ended the answer too early")
        num_tokens = usage.get("completion_tokens")
        tpot_s = (last - first) / (num_tokens - 1) if first and num_tokens and num_tokens > 1 else None
        return Answer(finish_reason, usage.get("prompt_tokens"), num_tokens, first and first - start, tpot_s)

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                response = Response(error.code, dict(error.headers), error.read())
            raise RefusedError(f"{self.url}{path} answers {response.error_text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(f"{self.url} cannot be reached: {getattr(error, 'reason', error)}") from error


def _lines(answer: http.client.HTTPResponse, url: str) -> Any:
    try:
        yield from answer
    except (OSError, http.client.HTTPException) as error:
        raise TransportError(f"{url} has hung up in the middle of an answer: {error}") from error


def _read(data: bytes, url: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise TransportError(f"{url} sends what is no event of OpenAI's API: {data[:200].decode(errors='replace')}")
    return event


def _show_reasoning(text: str) -> None:
    note(f"\033[2m{text}\033[22m" if sys.stderr.isatty() else text, end="")
