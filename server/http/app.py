"""The HTTP application: what every route shares, and the routes."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxllm import AsyncLLM, __version__
from jaxllm.server.api.drain import Drain
from jaxllm.server.api.errors import ApiError, UnexpectedErrors, add_error_handlers, documented_errors, shown
from jaxllm.server.api.keys import ApiKeys
from jaxllm.server.http.limits import BodyLimit, RequestId, Routing
from jaxllm.server.observability.watchdog import Watchdog
from jaxllm.server.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxllm.server.api.prompts.chat_templates import ChatTemplates
    from jaxllm.server.api.prompts.prompt_encoder import PromptEncoder
    from jaxllm.server.api.response_store import ResponseStore
    from jaxllm.server.observability.finished_request import FinishedRequest
    from jaxllm.server.observability.metrics import Metrics
    from jaxllm.server.observability.request_log import RequestLog
    from jaxllm.server.observability.tracing import Tracing

# The first that fits is taken, so what is asked for most comes first.
ROUTES = ("chat", "completions", "responses", "messages", "models", "health", "tokenize", "admin", "metrics")
UI_ROUTES = ("live", "page")


@dataclass(kw_only=True)
class Server:
    """What a route needs: `request.app.state.server`.

    parsers: the names of the parsers of tool calls and of reasoning; None for none.
    """

    llm: AsyncLLM
    config: ServerConfig
    keys: ApiKeys
    drain: Drain
    watchdog: Watchdog
    encoder: "PromptEncoder"
    templates: "ChatTemplates"
    responses: "ResponseStore"
    metrics: "Metrics"
    log: "RequestLog"
    tracing: "Tracing | None"
    parsers: tuple[str | None, str | None]

    @property
    def model_names(self) -> tuple[str, ...]:
        """What the model may be called in a request; answers of routes that are not told use the first."""
        return model_names(self.llm, self.config)

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


def model_names(llm: AsyncLLM, config: ServerConfig) -> tuple[str, ...]:
    return tuple(config.served_model_name or (llm.info.model,))


def create_app(
    llm: AsyncLLM,
    config: ServerConfig,
    *,
    keys: ApiKeys | None = None,
    drain: Drain | None = None,
    shared_folder: Path | None = None,
) -> FastAPI:
    """The application over a connected engine. It is used on one event loop, that of `llm`; `Server.close` ends it.

    Args:
      keys: read from `config.api_keys_file` when left out.
      drain: one of its own when left out.
      shared_folder: a private folder that all API workers of the server share; None with one worker.
    """
    from jaxllm.server.api.parsers import resolve_parsers
    from jaxllm.server.api.prompts.chat_templates import ChatTemplates
    from jaxllm.server.api.prompts.prompt_encoder import PromptEncoder
    from jaxllm.server.api.response_store import ResponseStore
    from jaxllm.server.observability.metrics import Metrics
    from jaxllm.server.observability.request_log import RequestLog

    tracing = None
    if config.otlp_endpoint is not None:
        from jaxllm.server.observability.tracing import Tracing

        tracing = Tracing(config.otlp_endpoint, model_name=model_names(llm, config)[0])
    encoder = PromptEncoder(llm)
    server = Server(
        llm=llm,
        config=config,
        keys=keys or ApiKeys.load(config.api_keys_file, config.admin_key),
        drain=drain or Drain(),
        watchdog=Watchdog(llm, config.watchdog_s),
        encoder=encoder,
        templates=ChatTemplates(llm, config, encoder),
        responses=ResponseStore(config.max_stored_responses, shared_folder),
        metrics=Metrics(llm, config, shared_folder),
        log=RequestLog(config),
        tracing=tracing,
        parsers=resolve_parsers(config.tool_call_parser, config.reasoning_parser, _chat_template(llm, config)),
    )
    app = FastAPI(
        title="jaxllm",
        version=__version__,
        description="An OpenAI-compatible endpoint of a jaxllm engine.",
        docs_url=None,  # They would load scripts from another host.
        redoc_url=None,
        separate_input_output_schemas=False,
        redirect_slashes=False,
    )
    app.state.server = server
    add_error_handlers(app)
    for name in ROUTES + UI_ROUTES * config.ui:
        module = import_module(f"jaxllm.server.api.routes.{name}")
        app.include_router(module.router, responses=documented_errors(f"/v1/{name}"))
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(Routing)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    app.add_middleware(RequestId)
    return app


def _chat_template(llm: AsyncLLM, config: ServerConfig) -> str | None:
    """The one in force; all of them, where the model has several for different uses."""
    from jaxllm.server.api.prompts.chat_templates import read_chat_template

    if (template := read_chat_template(config)) is not None:
        return template
    template = llm.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template
