"""What a client gets from a server: an answer, or none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxllm import JaxLLMError


class TransportError(JaxLLMError):
    """No answer, or a part of one: the server cannot be reached, has hung up, or does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def error_text(self) -> str:
        """What it says about an error, on one line: its status and its message."""
        try:
            error = json.loads(self.body)
            error = error.get("error", error)
            message = error["message"] if isinstance(error, dict) and "message" in error else json.dumps(error)
        except (ValueError, AttributeError):
            message = self.body.decode(errors="replace")
        return f"HTTP {self.status}: {' '.join(str(message).split())[:300]}"
