"""An engine core in a process of its own, which serves its clients over a local socket.

`python -c "from jaxllm.engine.core_process import main; main()"` is what `EngineProcess` starts; the launch order comes
through stdin, and when stdin ends, so does the process. What runs in it is any class with the methods of `Core`:

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
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import zmq

from jaxllm.config import EngineConfig
from jaxllm.engine.core_messages import (
    Abort,
    Ack,
    Answer,
    End,
    Forgotten,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Profile,
    Question,
    Ready,
    Refused,
    ResetPrefixCache,
    Submit,
    Taken,
    Tokens,
    decode_to_core,
    encode,
)
from jaxllm.engine.core_output import CoreOutput, Key
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.errors import EngineDeadError, InvalidRequestError, JaxLLMError, OverloadedError

logger = logging.getLogger(__name__)

CANNOT_START = 3
"""Exit code of a process that failed before it could serve."""

HEARTBEAT_S = 0.1
_WINDOW = 4  # messages of tokens on their way to a client; while it has not received them, further tokens merge
_CLIENT_TIMEOUT_S = 30.0  # for a client that is connected and receives nothing
_LISTEN_S = 0.01  # between two steps
_GRACE_S = 5.0  # to end by itself, when the owner has gone


class Core(Protocol):
    """What an engine must offer to run in a core process. `EngineCore` is one.

    All methods are called from one thread. It is made by ``Core(config)``, which returns when it can serve; what it
    raises is raised by `AsyncLLM.connect`.
    """

    info: EngineInfo
    """The tokenizer of the clients is read from `info.model` (a folder, or what else `EngineConfig.model` may be)."""

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` is to be called."""
        ...

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request. Raises InvalidRequestError, or OverloadedError, and leaves everything as it was. Anything
        else that it raises ends this request alone."""
        ...

    def end_request(self, request_id: str, reason: Literal["abort", "stop"]) -> CoreOutput | None:
        """Ends a request in any state. Returns its tokens that were not reported yet and its end, which no `step` will
        report again; None if no unfinished request has this id."""
        ...

    def step(self) -> CoreOutput:
        """Does one step, and reports what is new; it may be nothing. Must not block for long without work."""
        ...

    def recover(self, error: Exception) -> CoreOutput:
        """After a `step` that raised: ends the requests that were in it, with the reason "error", and reports that.
        Raises (the error itself will do) if the engine cannot go on; then the process ends, and is started again."""
        ...

    def stats(self) -> EngineStats:
        """At a cost that does not depend on the load; called every 100 ms."""
        ...

    def reset_prefix_cache(self, *, force: bool) -> bool: ...

    def profile(self, folder: str | None) -> None:
        """Starts a profiler trace there; None ends it. Raises InvalidRequestError."""
        ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What a core process is told at its start, pickled.

    address: where it listens; ipc://path.
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


@dataclass
class _Client:
    identity: bytes
    last_heard: float
    num_sent: int = 0  # messages that are to be acknowledged
    num_acknowledged: int = 0
    num_tokens_sent: int = 0  # of them, the last that had tokens
    merged: CoreOutput | None = None  # while the window is full


@dataclass
class _Owner:
    """Whose a request is, and what it is called there."""

    client: _Client
    handle: int
    name: str


@dataclass
class CoreServer:
    """Serves the clients of one core, in one thread: takes in what they say between steps.

    core: what runs the steps.
    socket: a bound ROUTER.
    is_stopping: asked between steps; true ends `run`.
    """

    core: Core
    socket: zmq.Socket[bytes]
    is_stopping: Callable[[], bool]
    _clients: dict[bytes, _Client] = field(default_factory=dict)
    _owners: dict[Key, _Owner] = field(default_factory=dict)  # by the request_id that the core knows
    _keys: dict[tuple[bytes, int], str] = field(default_factory=dict)  # the other way round
    _next_beat: float = 0.0

    def run(self) -> None:
        while not self.is_stopping():
            self._beat()
            busy = self.core.has_unfinished_requests
            wait_s = 0.0 if busy else max(0.0, self._next_beat - time.monotonic())
            if self.socket.poll(int(wait_s * 1e3) + (not busy)):
                self._listen()
            if self.core.has_unfinished_requests:
                self._report(self._step())

    def _step(self) -> CoreOutput:
        try:
            return self.core.step()
        except Exception as error:
            logger.exception("a step failed; the requests that were in it end")
            return self.core.recover(error)

    # To the clients

    def _report(self, output: CoreOutput) -> None:
        """Gives each client what is of its requests."""
        if not output:
            return
        for client, its_output in self._by_client(output):
            client.merged = its_output if client.merged is None else client.merged.joined(its_output)
            self._send_tokens(client)

    def _by_client(self, output: CoreOutput) -> list[tuple[_Client, CoreOutput]]:
        """The output in parts, whose keys are the clients' handles. The requests that ended are forgotten."""
        owners = self._owners
        if len(self._clients) == 1 and all(key in owners for key in output.keys):  # as almost always
            return [self._of_one_client(output)]
        parts: dict[bytes, tuple[_Client, CoreOutput]] = {}

        def part_of(owner: _Owner) -> CoreOutput:
            found = parts.get(owner.client.identity)
            if found is None:
                found = parts[owner.client.identity] = owner.client, CoreOutput(output.time)
            return found[1]

        for key, when, num_cached_tokens in output.started:
            if (owner := owners.get(key)) is not None:
                part_of(owner).started.append((owner.handle, when, num_cached_tokens))
        start = 0
        for index, key in enumerate(output.keys):
            end = start + (output.num_new_tokens[index] if output.num_new_tokens else 1)
            if (owner := owners.get(key)) is not None:
                part = part_of(owner)
                part.add_tokens(owner.handle, output.token_ids[start:end], output.logprobs.get(key))
            start = end
        for key, reason, error in output.finished:
            if (owner := owners.get(key)) is not None:
                part_of(owner).finished.append((owner.handle, reason, error))
                self._forget_request(key)
        return list(parts.values())

    def _of_one_client(self, output: CoreOutput) -> tuple[_Client, CoreOutput]:
        """What `_by_client` gives when there is one client; quicker."""
        (client,) = self._clients.values()
        owners = self._owners
        part = CoreOutput(
            output.time,
            started=[(owners[key].handle, when, number) for key, when, number in output.started if key in owners],
            keys=[owners[key].handle for key in output.keys],
            num_new_tokens=output.num_new_tokens,
            token_ids=output.token_ids,
            logprobs={owners[key].handle: logprobs for key, logprobs in output.logprobs.items()},
            finished=[(owners[key].handle, why, error) for key, why, error in output.finished if key in owners],
        )
        for key, _, _ in output.finished:
            if key in owners:
                self._forget_request(key)
        return client, part

    def _send_tokens(self, client: _Client) -> None:
        """Sends what has merged, unless the client is behind."""
        if client.merged is None or client.num_tokens_sent - client.num_acknowledged >= _WINDOW:
            return
        output, client.merged = client.merged, None
        client.num_sent += 1
        client.num_tokens_sent = client.num_sent
        self._send(client, Tokens(client.num_sent, output))

    def _beat(self) -> None:
        """Tells all that the core is alive, if it is time, and parts from clients that are not."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT_S
        if not self._clients:
            return
        stats = self.core.stats()
        for client in list(self._clients.values()):
            if now - client.last_heard > _CLIENT_TIMEOUT_S:
                logger.warning("a client has received nothing for %.0f s; its requests end", _CLIENT_TIMEOUT_S)
                self._part(client)
            else:
                client.num_sent += 1
                self._send(client, Heartbeat(client.num_sent, stats))

    def _send(self, client: _Client, message: Message) -> None:
        if not self._send_to(client.identity, message):
            self._part(client)

    def _send_to(self, identity: bytes, message: Message) -> bool:
        """False if nobody of this identity is connected, or does not read."""
        try:
            self.socket.send_multipart((identity, encode(message)), zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _part(self, client: _Client) -> None:
        """Ends all requests of a client."""
        if self._clients.pop(client.identity, None) is None:
            return
        for key in [key for (identity, _), key in self._keys.items() if identity == client.identity]:
            self._forget_request(key)
            self.core.end_request(key, "abort")

    # From the clients

    def _listen(self) -> None:
        """Takes in what has been said; while requests run, for so long only as does not hold them up."""
        end = time.monotonic() + _LISTEN_S
        while not self.core.has_unfinished_requests or time.monotonic() < end:
            try:
                identity, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:  # not two frames, so not a client of ours
                continue
            try:
                self._take_in(identity, decode_to_core(frame))
            except msgspec.MsgspecError as error:
                logger.error("a client sent what is no message: %s", error)
                if (client := self._clients.get(identity)) is not None:
                    self._part(client)
                self._send_to(identity, Forgotten())

    def _take_in(self, identity: bytes, message: Message) -> None:
        client = self._clients.get(identity)
        if isinstance(message, Hello):
            if client is not None:
                self._part(client)
            client = self._clients[identity] = _Client(identity, time.monotonic())
            self._send(client, Ready(self.core.info, self.core.stats()))
            return
        if client is None:
            self._send_to(identity, Forgotten())
            return
        client.last_heard = time.monotonic()
        match message:
            case Ack():
                client.num_acknowledged = max(client.num_acknowledged, message.number)
                self._send_tokens(client)
            case Submit():
                self._submit(client, message)
            case End():
                self._end(client, message)
            case Question():
                self._send(client, self._answer_to(message))
            case Goodbye():
                self._part(client)

    def _submit(self, client: _Client, message: Submit) -> None:
        request, name = message.request, message.request.request_id
        first_handle, keys = message.handles[0], list[str]()
        try:
            for index, (handle, seed) in enumerate(zip(message.handles, message.seeds, strict=True)):
                key = self._free_key(name if len(message.handles) == 1 else f"{name}#{index}")
                self.core.add_request(replace(request, request_id=key, seed=seed))
                keys.append(key)
                self._owners[key] = _Owner(client, handle, name)
                self._keys[client.identity, handle] = key
        except Exception as error:
            for key in keys:
                self._forget_request(key)
                self.core.end_request(key, "abort")
            self._send(client, _refusal(first_handle, error))
        else:
            self._send(client, Taken(first_handle))

    def _free_key(self, name: str) -> str:
        """`name`, or with a number behind it if another client calls its request the same."""
        key, number = name, 2
        while key in self._owners:
            key, number = f"{name}~{number}", number + 1
        return key

    def _end(self, client: _Client, message: End) -> None:
        for handle in message.handles:
            if (key := self._keys.get((client.identity, handle))) is not None:
                self._forget_request(key)
                self.core.end_request(key, message.reason)

    def _forget_request(self, key: Key) -> None:
        owner = self._owners.pop(key)
        del self._keys[owner.client.identity, owner.handle]

    def _answer_to(self, question: Question) -> Answer:
        value = True
        try:
            match question:
                case Abort():
                    value = self._abort(question.name)
                case ResetPrefixCache():
                    value = self.core.reset_prefix_cache(force=question.force)
                case Profile():
                    self.core.profile(question.folder)
        except Exception as error:
            if not isinstance(error, JaxLLMError):
                logger.exception("%s failed", question)
            return Answer(question.number, False, *_described(error))
        return Answer(question.number, value)

    def _abort(self, name: str) -> bool:
        """Ends the requests of this name, whosever they are; their owners are told."""
        keys = [key for key in self._keys.values() if self._owners[key].name == name]
        for key in keys:
            if (output := self.core.end_request(key, "abort")) is not None:
                self._report(output)
        return bool(keys)


def _described(error: Exception, otherwise: type[JaxLLMError] = JaxLLMError) -> tuple[str, str]:
    """Which of our errors it is to the client, and its message. An error that is not ours becomes `otherwise`."""
    if isinstance(error, JaxLLMError):
        return type(error).__name__, str(error)
    return otherwise.__name__, f"the engine raised {type(error).__name__}: {error}"


def _refusal(handle: int, error: Exception) -> Refused:
    if isinstance(error, OverloadedError):
        return Refused(handle, "OverloadedError", str(error), error.retry_after_s)
    if not isinstance(error, InvalidRequestError):
        logger.error("a request could not be added", exc_info=error)
    return Refused(handle, *_described(error))


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
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(order.address)
    except Exception as error:
        if not isinstance(error, JaxLLMError):
            logger.exception("the engine cannot start")
        if order.error_path is not None:
            write_error(Path(order.error_path), error)
        _exit(CANNOT_START)
    gc.collect()
    gc.freeze()  # What lives as long as the process need not be looked through again and again.
    try:
        CoreServer(core, socket, ended.is_set).run()
        core.shutdown()
    except Exception:
        logger.exception("the engine cannot go on")
        _exit(1)
    _exit(0)


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
    name, message = _described(error, otherwise=EngineDeadError)
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
