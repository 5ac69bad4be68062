"""A live server: uvicorn in a thread, over a real engine process."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import uvloop
from fastapi import FastAPI

from jaxllm import AsyncLLM, EngineConfig, EngineProcess
from jaxllm.server.api.keys import ApiKeys
from jaxllm.server.board import Board, Phase
from jaxllm.server.commands.serve import listen
from jaxllm.server.http.worker import HttpWorker
from jaxllm.server.server_config import ServerConfig

ADMIN_KEY = "admin-key-of-tests"


class LiveServer:
    """A server on a free port of localhost, in a thread with an event loop of its own.

    url: such as "http://127.0.0.1:40000"; the OpenAI API is under url + "/v1".
    """

    def __init__(self, process: EngineProcess, config: ServerConfig, keys: ApiKeys) -> None:
        self.process = process
        self.config = config
        self.board = Board()
        self._listener = listen(config)
        host, port = self._listener.getsockname()[:2]
        self.url = f"{'https' if config.has_tls else 'http'}://{host}:{port}"
        self._worker = HttpWorker(config=config, keys=keys, listener=self._listener)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self.llm: AsyncLLM | None = None
        self.app: FastAPI | None = None
        self.thread = threading.Thread(target=self._run, name="jaxllm-test-server")
        self.thread.start()
        self.wait_for(lambda: self.board.num_serving == 1 or not self.thread.is_alive(), timeout_s=120.0)
        if self._error is not None:
            raise self._error

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the server's event loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Until the condition holds; fails the test after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.01)

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Until no request is in the engine and all its pages are free, by a snapshot made after this call, and until
        all ends have come from there: they may be behind the snapshot."""
        start = time.monotonic()

        def is_idle() -> bool:
            stats = self.llm.stats if self.llm is not None else None
            if stats is None or stats.time < start:
                return False
            scheduler = stats.scheduler
            is_empty = scheduler.num_running == scheduler.num_waiting == scheduler.num_used_pages == 0
            return is_empty and not self.llm._outputs.keys

        self.wait_for(is_idle, timeout_s)

    def stop(self, phase: Phase = Phase.STOPPING) -> None:
        self.board.phase = max(phase, self.board.phase)
        self.thread.join(60.0)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self._error = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.llm = await AsyncLLM.connect(self.process.address)
        try:
            self.app = self._worker.make_app(self.llm, self.board)
            await self._worker.serve(self.app)
        finally:
            await self.llm.close()


def start_server(stack: ExitStack, engine_config: EngineConfig, engine: str, **options: Any) -> LiveServer:
    """Starts both, and ends them with the stack. Without options: a free port, and the admin key of the tests."""
    config = ServerConfig(**{"port": 0, "admin_key": ADMIN_KEY, "log_level": "warning"} | options)
    keys = ApiKeys.load(config.api_keys_file, config.admin_key)
    engine_config = dataclasses.replace(engine_config, tenants=keys.tenants, default_tenant=keys.default_tenant)
    process = EngineProcess(engine_config, engine=engine)
    stack.callback(process.stop, 5.0)
    process.start()
    server = LiveServer(process, config, keys)
    stack.callback(server.stop)
    return server
