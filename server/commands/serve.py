"""`jaxllm serve`: owns the port and the engine's process, and ends in good order."""

import asyncio
import dataclasses
import logging
import resource
import signal
import socket
import time
from functools import partial
from pathlib import Path

import uvloop

from jaxllm import AsyncLLM, ConfigError, EngineConfig, EngineProcess, JaxLLMError
from jaxllm.server.api.keys import ApiKeys
from jaxllm.server.api.parsers import resolve_parsers
from jaxllm.server.api.prompts.chat_templates import read_chat_template
from jaxllm.server.board import Board, Phase
from jaxllm.server.http.stand_in import StandIn
from jaxllm.server.http.worker import HttpWorker
from jaxllm.server.http.worker_process import WorkerProcess
from jaxllm.server.observability.logs import set_up_engine_logging, set_up_logging
from jaxllm.server.server_config import ServerConfig

logger = logging.getLogger("jaxllm.server")

ENGINE = "jaxllm.engine.start:start_core"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_FILES = 65536
_BACKLOG = 2048  # connections that wait to be taken
_POLL_S = 0.05
_END_S = 2.0  # in which processes end that were told to


def serve(engine_config: EngineConfig, config: ServerConfig, *, engine: str = ENGINE) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, and returns when everything has ended.

    engine: import path of what runs in the engine's process; see `EngineProcess`.

    Raises ConfigError, also for a port that is in use, and what loading the model raises, and JaxLLMError if an API
    worker ends before it could serve.
    """
    set_up_logging(config.log_format, config.log_level)
    _allow_many_connections()
    # Loading takes long: what is wrong is told before.
    resolve_parsers(config.tool_call_parser, config.reasoning_parser, read_chat_template(config))
    keys = ApiKeys.load(config.api_keys_file, config.admin_key)
    engine_config = dataclasses.replace(engine_config, tenants=keys.tenants, default_tenant=keys.default_tenant)
    listener = listen(config)
    engine_process = EngineProcess(engine_config, engine=engine)
    assert engine_process.folder is not None
    try:
        supervisor = _Supervisor(config, keys, listener, engine_process.folder)
        uvloop.run(supervisor.run(engine_process, engine_config.model))
    finally:
        engine_process.stop(_END_S)
        listener.close()


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens, from which all API workers take connections. Raises ConfigError if there is no such
    address, or somebody else listens there."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if config.host == "::":  # also IPv4, whatever the system's default is
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
            listener.listen(_BACKLOG)  # A port that is merely bound can be taken by somebody else.
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on host {config.host!r}, port {config.port}: {error.strerror}. Choose another with "
            "--host or --port, or --port 0 for any free one."
        ) from None
    return listener


def _allow_many_connections() -> None:
    """Shells often allow 1,024 open files, of which each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Supervisor:
    """Starts the HTTP side when the engine is ready, and ends both."""

    def __init__(self, config: ServerConfig, keys: ApiKeys, listener: socket.socket, folder: Path) -> None:
        self._config = config
        self._board_path = folder / "board"
        self._board = Board(config.api_workers, self._board_path)
        self._workers = [
            HttpWorker(
                config=config,
                keys=keys,
                listener=listener,
                index=index,
                num_workers=config.api_workers,
                shared_folder=folder if config.api_workers > 1 else None,
            )
            for index in range(config.api_workers)
        ]
        self._stand_in = StandIn(config, listener)
        self._is_connected = False
        self._task: asyncio.Task[None] | None = None

    async def run(self, engine_process: EngineProcess, model: str) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            # As nohup does with SIGHUP, and a script with SIGINT for what it runs in the background.
            if number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        logger.info("loading %s", model)
        config = self._config
        engine_process.start(
            partial(set_up_engine_logging, config.log_format, config.log_level, self._board_path, config.api_workers)
        )
        await self._stand_in.open()
        self._task = asyncio.create_task(self._run(engine_process.address))
        try:
            await self._task
        except asyncio.CancelledError:
            logger.info("stopped before the engine was ready")
        finally:
            self._stand_in.close()

    async def _run(self, address: str) -> None:
        start = time.monotonic()
        llm = await AsyncLLM.connect(address)
        self._is_connected = True
        self._log_engine(llm, time.monotonic() - start)
        try:
            worker = self._workers[0]
            app = worker.make_app(llm, self._board)
            self._log_parsers(app.state.server.parsers)
            watching = asyncio.create_task(self._watch_workers())
            if len(self._workers) == 1:
                await worker.serve(app)
            else:
                app.state.server.close()  # It has shown that the options are good.
                await self._run_workers(address)
            watching.cancel()
        finally:
            await llm.close()
        logger.info("ended")

    async def _run_workers(self, address: str) -> None:
        """Keeps a process for each API worker until the server ends."""
        processes = [WorkerProcess(worker, address, self._board) for worker in self._workers]
        try:
            while self._board.phase < Phase.SHUTTING_DOWN or any(process.may_have_requests for process in processes):
                if self._board.phase < Phase.SHUTTING_DOWN:
                    for process in processes:
                        process.keep()
                await asyncio.sleep(_POLL_S)
        except JaxLLMError:
            self._board.phase = Phase.STOPPING  # which the other workers obey
            raise
        finally:
            for process in processes:
                process.end(_END_S)

    def _on_signal(self, name: str) -> None:
        if not self._is_connected:
            assert self._task is not None
            self._task.cancel()
        elif self._board.phase < Phase.SHUTTING_DOWN:
            timeout_s = self._config.shutdown_timeout_s
            logger.info(
                "%s: %d requests in progress may finish within %g s; a second signal ends them",
                name, self._board.total_active, timeout_s,
            )  # fmt: skip
            self._board.phase = Phase.SHUTTING_DOWN
            asyncio.get_running_loop().call_later(timeout_s, self._stop, "the time is over")
        else:
            self._stop(name)

    def _stop(self, reason: str) -> None:
        if self._board.phase < Phase.STOPPING:
            logger.info("%s: ending %d requests", reason, self._board.total_active)
            self._board.phase = Phase.STOPPING

    def _log_engine(self, llm: AsyncLLM, seconds: float) -> None:
        info = llm.info
        device = info.device if info.platform in info.device.lower() else f"{info.device} ({info.platform})"
        logger.info(
            "the engine is ready after %.1f s: %s on %s, %s, context of %s tokens, %s pages of %d tokens",
            seconds, info.model, device, info.dtype, f"{info.max_model_len:,}", f"{info.num_pages - 1:,}",
            info.page_size,
        )  # fmt: skip

    def _log_parsers(self, parsers: tuple[str | None, str | None]) -> None:
        """A request with tools is refused where there is none for their calls."""
        asked = (self._config.tool_call_parser, self._config.reasoning_parser)
        options = ("--tool-call-parser", "--reasoning-parser")
        shown = [
            f"{option} {parser or 'none'}" + " (by the chat template)" * (wanted == "auto")
            for option, parser, wanted in zip(options, parsers, asked, strict=True)
        ]
        logger.info("in the model's text are found: %s", ", ".join(shown))

    async def _watch_workers(self) -> None:
        """Says where they serve, once all do, and has the stand-in answer while none does."""
        has_started = False
        while self._board.phase < Phase.SHUTTING_DOWN:
            if self._board.num_serving:
                self._stand_in.close()
            else:
                await self._stand_in.open()
            if not has_started and self._board.num_serving == len(self._workers):
                has_started = True
                self._log_start()
            await asyncio.sleep(_POLL_S)

    def _log_start(self) -> None:
        page = f", with a page at {self._url()}/" if self._config.ui else ""
        keys = "API keys are asked for" if self._config.api_keys_file else "no API key is asked for"
        logger.info("serving at %s/v1%s; %s", self._url(), page, keys)

    def _url(self) -> str:
        host, port = self._workers[0].listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self._config.has_tls else 'http'}://{host}:{port}"
