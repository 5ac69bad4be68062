"""What a client is told when something goes wrong: OpenAI's shape of an error, Anthropic's under /v1/messages."""

import logging
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from jaxllm import EngineDeadError, InvalidRequestError, OverloadedError
from jaxllm.server.api.json_fault import place_in

logger = logging.getLogger("jaxllm.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = "/v1/messages"
_MAX_SHOWN = 80  # characters of a value
_SHORT = reprlib.Repr(maxlist=_MAX_SHOWN, maxdict=_MAX_SHOWN, maxstring=2 * _MAX_SHOWN)  # a whole one may be a body


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's."""

    error: ErrorDetail


class AnthropicErrorCode(BaseModel):
    error_code: str


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: AnthropicErrorCode | None = None
    param: str | None = None
    """The field that is to blame: not Anthropic's, whose clients pass it on."""


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def _documented(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": body, "description": "The request is at fault, or comes at a bad time."},
        "5XX": {"model": body, "description": "The server is at fault, or not in service."},
    }


OPENAI_ERRORS, ANTHROPIC_ERRORS = _documented(ErrorBody), _documented(AnthropicErrorBody)
"""For `responses` of routes, by whose clients ask."""


class ApiError(HTTPException):
    """An answer with a status of 400 or above.

    message: names the value, the limit and the way out.
    type: of the error as OpenAI calls it; follows from the status.
    param: the field that is to blame.
    code: for programs, as "model_not_found".
    retry_after_s: when to try again; the official clients do.
    should_retry: False where that cannot help, and would cost as much again: the official clients then do not, which
        repeat what failed with 408, 409, 429 or 5xx.
    logged: the message without what the client said; as `message` when left out.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        headers: dict[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        headers = dict(headers or {})
        if retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
            should_retry = True
        if should_retry is not None:
            headers["x-should-retry"] = "true" if should_retry else "false"
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self._logged = logged

    @property
    def logged(self) -> str:
        return self.message if self._logged is None else self._logged

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it, in an answer or in a chunk of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """As Anthropic's clients read it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else self.type)
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        if self.param is not None:
            error["param"] = self.param
        return {"type": "error", "error": error, "request_id": request_id}

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """The answer to an exception. One that is not ours tells nothing of itself."""
        match error:
            case ApiError():
                return error
            case HTTPException():  # Starlette's own, for unknown paths and methods, and unreadable bodies
                return cls(error.status_code, error.detail, headers=dict(error.headers or {}))
            case InvalidRequestError():
                return cls(400, str(error), param=error.param)
            case OverloadedError():
                return cls(429, str(error), code="overloaded", retry_after_s=error.retry_after_s or 1.0)
            case EngineDeadError():
                return cls(503, str(error), code="engine_dead", retry_after_s=5.0)
            case RequestValidationError():
                return _of_validation(error.errors(), error.body)
            case _:
                return cls(500, "the server failed to handle the request; its log says why", code="internal_error")


@contextmanager
def blamed_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, what an error blames is called as the request calls it: `names["prompt"]` may be "messages"."""
    try:
        yield
    except (InvalidRequestError, ApiError) as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


def error_body(scope: Scope, error: ApiError) -> dict[str, Any]:
    """In the shape that the client of this request reads."""
    return error.anthropic_body(scope["request_id"]) if speaks_anthropic(scope) else error.body()


def speaks_anthropic(scope: Scope) -> bool:
    """Whether this request is one of Anthropic's clients, which also ask for /v1/models."""
    return scope["path"].startswith(_ANTHROPIC_PATH) or any(
        name == b"anthropic-version" for name, _ in scope["headers"]
    )


def _of_validation(errors: Sequence[Any], body: Any) -> ApiError:
    """Names the first field that does not fit, but for one whose error has a code, by which a program may go on."""
    first = next((error for error in errors if "code" in error.get("ctx", {})), errors[0])
    code = first.get("ctx", {}).get("code")
    where = [part for part in first["loc"] if part not in ("body", "query", "path", "header")]
    where = [part for part in where if not str(part).startswith("=")]  # tags of unions, as "=message"
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at {place_in(body, where[0])}")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" for part in where).lstrip(".")
    more = f" ({len(errors) - 1:,} more)" if len(errors) > 1 else ""
    match first["type"]:
        case "contradiction":
            param = ".".join(filter(None, (param, shortened(first["ctx"]["param"]))))
            message = first["msg"] + more
        case "extra_forbidden":
            message = f"{param} is not supported{more}"
        case "missing" if param:
            message = f"{param} is missing{more}"
        case "missing":
            message = "the request has no body; it must be a JSON object"
        case "model_attributes_type" if not param:
            message = 'the body must be a JSON object, sent with the header "Content-Type: application/json"'
        case _:
            message = first["msg"].removeprefix("Value error, ") + more
            if param:
                logged = f"{param}: {message}"  # Values are what somebody said.
                message = f"{param} is {shown(first.get('input'))}: {message}"
                return ApiError(400, message, param=param, code=code, logged=logged)
    return ApiError(400, message, param=param or None)


def shown(value: Any) -> str:
    """A value that a client has sent, in a message about it: no longer than a line."""
    return shortened(_SHORT.repr(value))


def shortened(text: str) -> str:
    """A text that a client has sent, for a message or a line of the log."""
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
