"""Server-sent events as OpenAI's clients of completions read them."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.json_body import encode_json

DONE = b"data: [DONE]\n\n"


def error_events(error: ApiError) -> bytes:
    """What ends a stream that has failed."""
    return b"data: " + encode_json(error.body()) + b"\n\n" + DONE


class ChunkWriter:
    """Writes the chunks of one streamed answer. What is the same in all of them is encoded once."""

    def __init__(self, fields: Mapping[str, Any], *, include_usage: bool) -> None:
        """`fields` of every chunk: id, object, created, model."""
        self._head = b"data: " + encode_json(dict(fields))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._own_fields: dict[str, Any] = {"usage": None} if include_usage else {}

    def chunk(self, choice: bytes) -> bytes:
        """An event with one choice, which is a JSON object."""
        return self._head + choice + self._tail

    def chunk_with(self, choice: bytes, fields: Mapping[str, Any]) -> bytes:
        """The same, with fields that this chunk alone has beside its choice."""
        own_fields = {**self._own_fields, **fields}
        if not own_fields:
            return self.chunk(choice)
        return self._head + choice + b"]," + encode_json(own_fields)[1:] + b"\n\n"

    def usage(self, usage: BaseModel) -> bytes:
        """The last event, with the numbers of tokens and no choice."""
        return self._head + b'],"usage":' + usage.model_dump_json(exclude_unset=True).encode() + b"}\n\n"
