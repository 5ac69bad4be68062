"""The HTTP application: the routes behind the middlewares, over a connected engine."""

from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxllm import AsyncLLM, __version__
from jaxllm.server.api.drain import Drain
from jaxllm.server.api.errors import ANTHROPIC_ERRORS, OPENAI_ERRORS
from jaxllm.server.api.keys import ApiKeys
from jaxllm.server.api.parsers import resolve_parsers
from jaxllm.server.api.prompts.chat_templates import ChatTemplates, read_chat_template
from jaxllm.server.api.prompts.prompt_encoder import PromptEncoder
from jaxllm.server.api.response_store import ResponseStore
from jaxllm.server.api.routes import (
    admin,
    chat_completions,
    completions,
    health,
    live,
    messages,
    metrics,
    models,
    page,
    responses,
    tokenize,
)
from jaxllm.server.api.server import Server
from jaxllm.server.http.error_answers import UnexpectedErrors, add_error_handlers
from jaxllm.server.http.limits import BodyLimit, RequestId, Routing
from jaxllm.server.observability.metrics import Metrics
from jaxllm.server.observability.request_log import RequestLog
from jaxllm.server.observability.tracing import Tracing
from jaxllm.server.observability.watchdog import Watchdog
from jaxllm.server.server_config import ServerConfig


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
    model_names = tuple(config.served_model_name or (llm.info.model,))
    tracing = None if config.otlp_endpoint is None else Tracing(config.otlp_endpoint, model_name=model_names[0])
    encoder = PromptEncoder(llm)
    server = Server(
        llm=llm,
        config=config,
        model_names=model_names,
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
    _include_routes(app, with_page=config.ui)
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


def _include_routes(app: FastAPI, *, with_page: bool) -> None:
    """The first that fits is taken, so what is asked for most comes first."""
    app.include_router(chat_completions.router, responses=OPENAI_ERRORS)
    app.include_router(completions.router, responses=OPENAI_ERRORS)
    app.include_router(responses.router, responses=OPENAI_ERRORS)
    app.include_router(messages.router, responses=ANTHROPIC_ERRORS)
    app.include_router(models.router, responses=OPENAI_ERRORS)
    app.include_router(health.router, responses=OPENAI_ERRORS)
    app.include_router(tokenize.router, responses=OPENAI_ERRORS)
    app.include_router(admin.router, responses=OPENAI_ERRORS)
    app.include_router(metrics.router, responses=OPENAI_ERRORS)
    if with_page:
        app.include_router(live.router, responses=OPENAI_ERRORS)
        app.include_router(page.router, responses=OPENAI_ERRORS)


def _chat_template(llm: AsyncLLM, config: ServerConfig) -> str | None:
    """The one in force; all of them, where the model has several for different uses."""
    if (template := read_chat_template(config)) is not None:
        return template
    template = llm.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template
