"""One HTTP process: the application on an event loop, from the first connection to the last."""

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from jaxllm import AsyncLLM
from jaxllm.server.api.drain import Drain
from jaxllm.server.api.keys import ApiKeys
from jaxllm.server.api.server import Server
from jaxllm.server.board import Board, Phase
from jaxllm.server.http.app import create_app
from jaxllm.server.http.connection import GuardedProtocol, OnRefusal
from jaxllm.server.http.descriptor_reserve import DescriptorReserve
from jaxllm.server.observability.logs import set_log_level, set_up_logging
from jaxllm.server.server_config import ServerConfig

_POLL_S = 0.05
_ERROR_S = 1.0  # in which answers that were cut off get their error
_CLOSE_S = 1  # in which connections are closed
_KEEP_ALIVE_S = 75  # more than the 60 s that load balancers keep idle connections


@dataclass(frozen=True, kw_only=True)
class HttpWorker:
    """Serves until the board says that the server is to end.

    listener: a socket that listens; all API workers take connections from the same one, whoever has time.
    index: its number among the API workers.
    num_workers: how many there are.
    shared_folder: with the board and whatever else they share; None for the only one, which brings its own board.
    """

    config: ServerConfig
    keys: ApiKeys
    listener: socket.socket
    index: int = 0
    num_workers: int = 1
    shared_folder: Path | None = None

    def make_app(self, llm: AsyncLLM, board: Board) -> FastAPI:
        return create_app(
            llm, self.config, keys=self.keys, drain=Drain(board, self.index), shared_folder=self.shared_folder
        )

    async def serve(self, app: FastAPI) -> None:
        """Serves, and returns when the board's phase has told it to, with all requests ended and connections
        closed."""
        server: Server = app.state.server
        reserve = DescriptorReserve(server.metrics.connection_refused)
        http = _UvicornServer(uvicorn_config(app, self.config, reserve=reserve, on_refusal=server.refused))
        gc.collect()
        gc.freeze()  # What lives as long as the process would be looked through again and again, for 0.1 s each time.
        serving = asyncio.ensure_future(http.serve([self.listener]))
        try:
            await self._watch(server, http, serving)
        finally:
            server.drain.board.set_worker(self.index, serves=False, num_active=0)
            http.should_exit = True
            await serving
            server.close()

    async def _watch(self, server: Server, http: uvicorn.Server, serving: asyncio.Future[None]) -> None:
        """Does what the board says, until it says to end."""
        drain, board = server.drain, server.drain.board
        log_level = 0
        while not serving.done():
            if http.started:
                board.set_worker(self.index, serves=True, num_active=drain.num_active)
            server.watchdog.look()
            if board.log_level != log_level:
                log_level = board.log_level
                set_log_level(log_level)
            if board.phase is Phase.STOPPING or (board.phase is Phase.SHUTTING_DOWN and not drain.num_active):
                await server.llm.close()  # which ends its streams, whatever state the engine is in
                await drain.wait_until_idle(_ERROR_S)
                return
            await asyncio.sleep(_POLL_S)

    def run(self, address: str) -> None:
        """The main function of a process of its own: serves the engine at `address`, and ends with its parent. The
        parent alone obeys signals: a terminal's Ctrl-C and a service manager's SIGTERM reach all processes."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        set_up_logging(self.config.log_format, self.config.log_level)
        assert self.shared_folder is not None
        board = Board(self.num_workers, self.shared_folder / "board")
        uvloop.run(self._serve_for_parent(address, board))

    async def _serve_for_parent(self, address: str, board: Board) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_reader(parent.sentinel, task.cancel)  # readable when the parent has died
        with contextlib.suppress(asyncio.CancelledError):
            llm = await AsyncLLM.connect(address)
            try:
                await self.serve(self.make_app(llm, board))
            finally:
                await llm.close()


class _UvicornServer(uvicorn.Server):
    """Leaves signals alone: they are the business of who has started us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(
    app: ASGIApp, config: ServerConfig, *, reserve: DescriptorReserve, on_refusal: OnRefusal
) -> uvicorn.Config:
    """How connections are treated, whoever answers them. `reserve`, `on_refusal`: see GuardedProtocol."""
    protocol: Any = partial(
        GuardedProtocol,
        header_timeout_s=config.header_timeout_s,
        send_timeout_s=config.send_timeout_s,
        reserve=reserve,
        on_refusal=on_refusal,
    )
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
