"""Every answer with an error comes from here."""

import logging
from collections.abc import Awaitable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm import EngineDeadError, InvalidRequestError, OverloadedError
from jaxllm.server.api.errors import ApiError, error_body, shortened
from jaxllm.server.api.json_fault import json_fault
from jaxllm.server.api.server import server_of

logger = logging.getLogger("jaxllm.server")


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """The answer to the request of this scope, in the shape that its client reads. It is counted, and logged unless
    that has been done."""
    server = server_of(HTTPConnection(scope))
    server.metrics.refused(error.status)
    if not scope.get("jaxllm.is_logged"):
        server.log.refused(
            endpoint=shortened(scope["path"]),
            request_id=scope["request_id"],
            status=error.status,
            message=error.logged,
        )
    return JSONResponse(error_body(scope, error), error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every answer with an error comes from here, also for unknown paths and for exceptions of ours."""

    async def answer_expected(request: Request, error: Exception) -> JSONResponse:
        api_error = ApiError.of(error)
        is_ours = isinstance(error, ApiError) or not isinstance(error, HTTPException)
        if not is_ours and isinstance(error.__cause__, ValueError | RecursionError):
            # FastAPI's, for JSON that Python gives up, without a word of why.
            body = b"".join(request.scope.get("jaxllm.body", ()))
            api_error.message = f"the body cannot be read: {json_fault(body)}"
        if type(error) is HTTPException and error.status_code in (404, 405):  # Starlette's, which names neither
            api_error.message = f"there is no {request.method} {shortened(request.url.path)} here"
            if error.status_code == 405:
                if "model" in request.path_params:  # What is no model takes no GET either.
                    try:
                        server_of(request).check_model(request.path_params["model"])
                    except ApiError as unknown:
                        return error_response(request.scope, unknown)
                allowed = ", ".join(_allowed_methods(request.scope))
                api_error.message += f"; it takes {allowed}"
                api_error.headers = {"allow": allowed}
        return error_response(request.scope, api_error)

    for kind in (HTTPException, RequestValidationError, InvalidRequestError, OverloadedError, EngineDeadError):
        app.add_exception_handler(kind, answer_expected)


def _allowed_methods(scope: Scope) -> list[str]:
    """Those of all routes with this path, of which Starlette names the first one's."""
    routes = scope["app"].routes
    taken = [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return sorted([*taken, *["HEAD"] * ("GET" in taken)])


class UnexpectedErrors:
    """Answers 500 to a request whose handling raised what no handler knows, and logs it. Inside of the middlewares that
    set headers, which Starlette's own handler of such errors is not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        def watch(message: Message) -> Awaitable[None]:  # plain, for it is called for each event of a stream
            nonlocal has_started
            has_started = True
            return send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if has_started:  # uvicorn logs it, and closes the connection, which tells the client.
                raise
            logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await error_response(scope, ApiError.of(error))(scope, receive, send)
