"""An engine core in a process of its own, which serves its clients at a local socket.

`python -c "from jaxllm.engine.process.child import main; main()"` is what `EngineProcess` starts; the launch order
comes through stdin, and when stdin ends, so does the process. What runs in it is made by a function of an
`EngineConfig` that returns a `Core`, such as a class:

    class MyCore:
        def __init__(self, config: EngineConfig): ...
        ...

    EngineProcess(config, engine="my_module:MyCore")

`my_module` is found on the `sys.path` of the process that owns the `EngineProcess`.
"""

import faulthandler
import gc
import importlib
import json
import logging
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.core import Core
from jaxllm.engine.process.server import CoreServer, described
from jaxllm.errors import EngineDeadError, JaxLLMError

logger = logging.getLogger(__name__)

CANNOT_START = 3
"""Exit code of a process that failed before it could serve."""

_GRACE_S = 5.0  # to end by itself, when the owner has gone


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What a core process is told at its start, pickled.

    address: path of the local socket at which it listens.
    error_path: where it writes why it cannot start: JSON, {"error": name of one of `jaxllm.errors`, "message": text}.
        None: a process that served before does not.
    folder: to be removed when the owner has gone, for it may have been killed; None if it is not the owner's.
    at_start: called first.
    """

    config: EngineConfig
    engine: str
    address: str
    error_path: str | None
    folder: str | None
    sys_path: list[str]
    owner_pid: int
    at_start: Callable[[], None] | None


def main() -> None:
    """Runs a core process, by the order in stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # They often go to a whole group. The owner decides.
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(format="jaxllm engine: %(levelname)s: %(message)s")
    order: LaunchOrder = pickle.load(sys.stdin.buffer)
    sys.path[:] = order.sys_path
    if order.at_start is not None:
        order.at_start()
    ended = threading.Event()
    threading.Thread(target=_watch_owner, args=(order, ended), name="jaxllm-owner", daemon=True).start()
    try:
        module, _, name = order.engine.partition(":")
        core: Core = getattr(importlib.import_module(module), name)(order.config)
        listener = listen(order.address)
    except Exception as error:
        if not isinstance(error, JaxLLMError):
            logger.exception("the engine cannot start")
        if order.error_path is not None:
            write_error(Path(order.error_path), error)
        _exit(CANNOT_START)
    gc.collect()
    gc.freeze()  # What lives as long as the process need not be looked through again and again.
    try:
        CoreServer(core, listener, ended.is_set).run()
        core.shutdown()
    except Exception:
        logger.exception("the engine cannot go on")
        _exit(1)
    _exit(0)


def listen(address: str) -> socket.socket:
    """A socket at which clients can connect from now on. Whoever listened there before has ended."""
    Path(address).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return listener


def _watch_owner(order: LaunchOrder, ended: threading.Event) -> None:
    """Waits for the owner to close our stdin, or to die, when a child of its may still hold the other end open."""
    while os.getppid() == order.owner_pid and not select.select([sys.stdin], [], [], 1.0)[0]:
        pass
    ended.set()
    if order.folder is not None:
        shutil.rmtree(order.folder, ignore_errors=True)
    time.sleep(_GRACE_S)
    _exit(1)


def write_error(path: Path, error: Exception) -> None:
    """Tells the clients why a process cannot start."""
    name, message = described(error, otherwise=EngineDeadError)
    text = json.dumps({"error": name, "message": message})
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _exit(code: int) -> None:
    """At once: threads that compile would otherwise be waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
