"""What all routes share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from jaxllm.server.api.errors import ApiError, shown

if TYPE_CHECKING:
    from jaxllm import AsyncLLM
    from jaxllm.server.api.drain import Drain
    from jaxllm.server.api.keys import ApiKeys
    from jaxllm.server.api.prompts.chat_templates import ChatTemplates
    from jaxllm.server.api.prompts.prompt_encoder import PromptEncoder
    from jaxllm.server.api.response_store import ResponseStore
    from jaxllm.server.observability.finished_request import FinishedRequest
    from jaxllm.server.observability.metrics import Metrics
    from jaxllm.server.observability.request_log import RequestLog
    from jaxllm.server.observability.tracing import Tracing
    from jaxllm.server.observability.watchdog import Watchdog
    from jaxllm.server.server_config import ServerConfig


@dataclass(kw_only=True)
class Server:
    """The engine, and what stands between it and the requests of one application.

    model_names: what the model may be called in a request; answers of routes that are not told use the first.
    parsers: the names of the parsers of tool calls and of reasoning; None for none.
    """

    llm: "AsyncLLM"
    config: "ServerConfig"
    model_names: tuple[str, ...]
    keys: "ApiKeys"
    drain: "Drain"
    watchdog: "Watchdog"
    encoder: "PromptEncoder"
    templates: "ChatTemplates"
    responses: "ResponseStore"
    metrics: "Metrics"
    log: "RequestLog"
    tracing: "Tracing | None"
    parsers: tuple[str | None, str | None]

    def check_model(self, name: str | None) -> str:
        """The model's name; without one the first is meant. Raises ApiError 404 for a model that is not served here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404, f"there is no model {shown(name)}; this server has {known}", param="model", code="model_not_found"
            )
        return name

    def finished(self, request: "FinishedRequest") -> None:
        """Counts, logs and traces a request that has ended."""
        self.metrics.request_finished(request)
        self.log.finished(request)
        if self.tracing is not None:
            self.tracing.finished(request)

    def refused(self, path: str, request_id: str, status: int, message: str) -> None:
        """Counts and logs what got no further than its head."""
        self.metrics.refused(status)
        self.log.refused(endpoint=path[:80] or "-", request_id=request_id, status=status, message=message)

    def close(self) -> None:
        """Ends its threads and closes its files. The engine is not its own."""
        self.encoder.close()
        self.responses.close()
        if self.tracing is not None:
            self.tracing.close()


def server_of(connection: HTTPConnection) -> Server:
    """The one that this request has come to."""
    server: Server = connection.app.state.server
    return server


async def _server(request: Request) -> Server:  # A plain function would run in a thread.
    return server_of(request)


ServerDep = Annotated[Server, Depends(_server)]
"""`server: ServerDep`, a parameter of a route. It takes FastAPI some 20 µs, so routes that generate, which need the
request itself anyway, call `server_of`."""
