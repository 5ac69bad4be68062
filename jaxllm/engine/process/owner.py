"""The owner of a core process: starts it, starts it again when it dies, and ends it."""

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.process.child import CANNOT_START, LaunchOrder, write_error
from jaxllm.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

_MAIN = "from jaxllm.engine.process.child import main; main()"
_MAX_PATH_BYTES = 100  # of a local socket; the system's limit is 107
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LONG_LIFE_S = 60.0  # after so much, a death is not held against the next life
_WATCHER_S = 5.0  # in which the thread ends whose process has ended


class EngineProcess:
    """Runs an engine core in a process of its own, for any number of `AsyncLLM`s in this and other processes.

    When the process dies it is started again, after a pause that grows from 0.1 to 30 s if it dies again soon; if it
    cannot start the first time, it is not tried again. It ends when this process does, however that ends: its
    stdin is a pipe from here. It ignores SIGINT, SIGTERM and SIGHUP, which are for its owner.

    Args:
      config: of the engine.
      engine: import path of what runs in the process; see `core.Core`.
      address: absolute path of the local socket at which it listens; without one, in a new `folder` that only this user
        can open, which may hold other things that live as long, and is removed at the end, even if this process is
        killed.

    Raises ConfigError: the address is not absolute, or too long.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine: str = "jaxllm.engine.start:start_core",
        address: str | None = None,
    ):
        self._config = config
        self._engine = engine
        self._at_start: Callable[[], None] | None = None
        self.folder = None if address is not None else Path(tempfile.mkdtemp(prefix="jaxllm-"))
        self.address = address if address is not None else f"{self.folder}/core"
        if not os.path.isabs(self.address) or len(os.fsencode(self.address)) > _MAX_PATH_BYTES:
            self._remove_folder()
            raise ConfigError(
                f"the address of the engine process is {self.address!r}; it must be an absolute path of at most "
                f"{_MAX_PATH_BYTES} bytes. Give a shorter one, or set TMPDIR to a folder with a shorter path."
            )
        self._socket_path, self._error_path = Path(self.address), error_path(self.address)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None between two lives, before the first and after the last."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self, at_start: Callable[[], None] | None = None) -> None:
        """Starts the process and returns at once; `AsyncLLM.connect` waits until it is ready.

        at_start: what the process calls first, whenever it starts, as to set up its logging; it is pickled.
        """
        assert self._watcher is None, "an EngineProcess starts once"
        self._at_start = at_start
        for path in (self._error_path, self._socket_path):
            path.unlink(missing_ok=True)
        self._spawn(is_first=True)
        self._watcher = threading.Thread(target=self._watch, name="jaxllm-engine-watcher", daemon=True)
        self._watcher.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the process, by force if it has not ended after `timeout_s`. Requests that run end with an error."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_WATCHER_S)
        self._remove_folder()

    def _spawn(self, *, is_first: bool) -> None:
        order = LaunchOrder(
            config=self._config,
            engine=self._engine,
            address=self.address,
            error_path=str(self._error_path) if is_first else None,
            folder=None if self.folder is None else str(self.folder),
            sys_path=sys.path,
            owner_pid=os.getpid(),
            at_start=self._at_start,
        )
        with self._lock:
            if self._stopping.is_set():
                return
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            process = subprocess.Popen([sys.executable, "-P", "-c", _MAIN], stdin=subprocess.PIPE, env=environment)
            self._process = process
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps(order))
            process.stdin.flush()
        except BrokenPipeError:
            logger.error("the engine process ended before it had read what to do")

    def _watch(self) -> None:
        """Starts the process again whenever it has ended."""
        pause_s = _FIRST_PAUSE_S
        while True:
            process, started = self._process, time.monotonic()
            assert process is not None
            code = process.wait()
            assert process.stdin is not None
            process.stdin.close()
            if self._stopping.is_set():
                return
            if self.num_restarts == 0 and not self._has_listened:
                if code != CANNOT_START:  # which has told why
                    message = f"the engine process ended with code {code} before it could serve"
                    write_error(self._error_path, EngineDeadError(message))
                logger.error("the engine process could not start")
                return
            pause_s = _FIRST_PAUSE_S if time.monotonic() - started > _LONG_LIFE_S else pause_s
            logger.error("the engine process has ended with code %d; it starts again in %.1f s", code, pause_s)
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.num_restarts += 1
            self._spawn(is_first=False)

    @property
    def _has_listened(self) -> bool:
        """Whether some process has come so far since the start."""
        return self._socket_path.exists()

    def _remove_folder(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def error_path(address: str) -> Path:
    """The file in which a process that listens there says why it could not start."""
    return Path(address + ".error")
