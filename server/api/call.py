"""What an HTTP request says beside its body."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.datastructures import Headers

from jaxllm import RequestOptions
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.keys import Caller, caller_of
from jaxllm.server.api.protocol.option_fields import OptionFields
from jaxllm.server.api.server import server_of

_MAX_PRIORITY = 2**31 - 1
_MAX_TIMEOUT_S = 30 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Who asks, and how that is to be served.

    request_id: the client's own name for it (X-Request-Id), or the server's.
    endpoint: the path.
    options: what headers, key and server say, and the body, once it has been read.
    received: when, by `time.monotonic`.
    trace_headers: `traceparent` and `tracestate`, as far as it has them.
    """

    request_id: str
    endpoint: str
    caller: Caller
    options: RequestOptions
    received: float
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def longest_wait_s(self) -> float | None:
        """For its start; None: without end."""
        limits = self.options.timeout_s, self.options.queue_timeout_s
        return min((limit for limit in limits if limit is not None), default=None)

    def with_body(self, body: OptionFields) -> "Call":
        """What the body says takes the place of what the headers do. Raises ApiError 400."""
        said: dict[str, Any] = {}
        if body.priority is not None:
            said["priority"] = _priority("priority", body.priority, self.caller)
        if body.cache_salt is not None:
            said["cache_salt"] = body.cache_salt
        return replace(self, options=replace(self.options, **said)) if said else self


_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": _MAX_TIMEOUT_S}
CALL_HEADERS = {
    "parameters": [
        {"in": "header", "name": name, "required": False, "description": description, "schema": schema}
        for name, description, schema in (
            (
                "X-Priority",
                "Added to the priority of the API key. Lower runs first.",
                {"type": "integer", "minimum": 0, "maximum": _MAX_PRIORITY},
            ),
            ("X-Timeout-S", "Ends the request after so many seconds.", _SECONDS),
            ("X-Queue-Timeout-S", "Ends the request if it has not begun after so many seconds.", _SECONDS),
        )
    ]
}
"""`openapi_extra` of a route that depends on `read_call`. FastAPI's own headers would cost a tenth of a short request:
it makes a model of each, every time."""


async def read_call(request: Request) -> Call:
    """Raises ApiError 401 for a wrong key, 400 for a header that cannot be."""
    caller = caller_of(request)
    config = server_of(request).config
    headers = request.headers
    return Call(
        request_id=request.scope["request_id"],
        endpoint=request.url.path,
        caller=caller,
        options=RequestOptions(
            priority=_priority("X-Priority", _number(headers, "X-Priority", int) or 0, caller),
            tenant=caller.tenant,
            timeout_s=_timeout(headers, "X-Timeout-S", config.request_timeout_s),
            queue_timeout_s=_timeout(headers, "X-Queue-Timeout-S", config.queue_timeout_s),
        ),
        received=time.monotonic(),
        trace_headers={name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
    )


CallDep = Annotated[Call, Depends(read_call)]
"""`call: CallDep`, a parameter of a route."""


def _number[T: (int, float)](headers: Headers, name: str, kind: type[T]) -> T | None:
    if (text := headers.get(name)) is None:
        return None
    try:
        if "_" in text or not text.isascii():  # which Python would read
            raise ValueError
        return kind(text)
    except ValueError:
        words = "an integer" if kind is int else "a number of seconds"
        raise ApiError(400, f"{name} is {text[:40]!r}; it must be {words}", param=name) from None


def _priority(name: str, priority: int, caller: Caller) -> int:
    if not 0 <= priority <= _MAX_PRIORITY - caller.priority:
        raise ApiError(
            400,
            f"{name} is {priority:,}; it is added to the priority {caller.priority:,} of the API key and must be from "
            f"0 to {_MAX_PRIORITY - caller.priority:,}, for lower numbers run first",
            param=name,
        )
    return caller.priority + priority


def _timeout(headers: Headers, name: str, limit_s: float | None) -> float | None:
    asked_s = _number(headers, name, float)
    if asked_s is None:
        return limit_s
    if not 0 < asked_s <= _MAX_TIMEOUT_S:
        message = f"{name} is {asked_s:g}; it must be a number of seconds above 0, up to {_MAX_TIMEOUT_S:,.0f}"
        raise ApiError(400, message, param=name)
    return asked_s if limit_s is None else min(asked_s, limit_s)
