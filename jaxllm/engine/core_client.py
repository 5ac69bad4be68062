"""An event loop's connection to a core process."""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any, Literal

import zmq

import jaxllm.errors
from jaxllm.engine.core_messages import (
    Ack,
    Answer,
    End,
    EndReason,
    Forgotten,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Question,
    Ready,
    Refused,
    Submit,
    Taken,
    Tokens,
    decode_to_client,
    encode,
)
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_process import error_path
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.errors import EngineDeadError, JaxLLMError, OverloadedError

State = Literal["starting", "ready", "restarting", "stopped"]

_RECONNECT_MS = 50
_LOOK_S = 0.2  # how often to look whether the process has given up, while it is not there
_MAX_MESSAGES = 64  # to be read before others of the event loop have their turn
_LINGER_MS = 1000  # for the goodbye


class CoreClient:
    """Says Hello whenever a core begins to listen at the address, and hears what it says.

    It belongs to the event loop in which it was made.

    Args:
      address: of the core process.
      on_output: called with what steps have brought; its keys are the handles of `submit`.
      on_lost: called with the reason when the core, and with it every request, is gone.
    """

    def __init__(self, address: str, *, on_output: Callable[[CoreOutput], None], on_lost: Callable[[str], None]):
        self.address = address
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.num_lost = 0
        self._on_output = on_output
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._error_path = error_path(address)
        self._folder = self._error_path.parent
        self._last_heard = time.monotonic()
        self._ready = self._loop.create_future()  # done when the core is ready, or will never be
        self._submits: dict[int, asyncio.Future[None]] = {}  # by the first handle
        self._questions: dict[int, asyncio.Future[bool]] = {}  # by the number
        self._numbers = itertools.count(1)
        self._is_read_planned = False
        self._connect()
        self._watcher = self._loop.create_task(self._watch())

    @property
    def heartbeat_age_s(self) -> float:
        """Since the core was last heard of; while it is in a step, it is silent."""
        return time.monotonic() - self._last_heard

    async def wait_until_ready(self) -> None:
        """Raises what the core could not start because of, or EngineDeadError if nobody is going to start it."""
        await asyncio.shield(self._ready)

    async def submit(self, handles: list[int], seeds: list[int | None], request: CoreRequest) -> None:
        """Returns when the core has queued the request for each of the handles.

        Raises InvalidRequestError, OverloadedError, or EngineDeadError. When it is cancelled, or raises, the core
        does not know the handles.
        """
        self._require_ready()
        try:
            frame = encode(Submit(handles, seeds, request))
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise jaxllm.errors.InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        taken = self._submits[handles[0]] = self._loop.create_future()
        self._send_frame(frame)
        try:
            await taken
        except asyncio.CancelledError:
            self.end(handles, "abort")
            raise
        finally:
            self._submits.pop(handles[0], None)

    def end(self, handles: list[int], reason: EndReason) -> None:
        """Tells the core that nobody wants more of these."""
        if self.state == "ready":
            self._send(End(handles, reason))

    def next_number(self) -> int:
        """For a question to `ask`."""
        return next(self._numbers)

    async def ask(self, question: Question) -> bool:
        """The core's answer. Raises what the core says is wrong, or EngineDeadError."""
        self._require_ready()
        answer = self._questions[question.number] = self._loop.create_future()
        self._send(question)
        try:
            return await answer
        finally:
            self._questions.pop(question.number, None)

    def close(self) -> None:
        """Takes leave of the core, which ends the requests."""
        if self.state == "stopped":
            return
        if self.state == "ready":
            self._send(Goodbye())
        self._stop(EngineDeadError("the connection to the engine has been closed"))

    # The connection

    def _connect(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket = socket
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(self.address)
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._notice)
        self._notice()  # its file descriptor tells of news only after it was asked once
        self._send(Hello())

    def _disconnect(self) -> None:
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _notice(self) -> None:
        """The only event that is asked for: whoever listened there does not any more."""
        if _has_news(self._monitor):
            self._lose("the engine process has ended")

    def _lose(self, reason: str) -> None:
        """Forgets all requests, and waits for the next core."""
        self._disconnect()
        if self.state == "ready":
            self.state = "restarting"
            self._ready = self._loop.create_future()
            self.num_lost += 1
        self._fail_all(EngineDeadError(reason))
        self._connect()
        self._on_lost(reason)

    def _stop(self, error: JaxLLMError) -> None:
        """Nothing will come any more."""
        self.state = "stopped"
        self._watcher.cancel()
        self._disconnect()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marked as seen, for perhaps nobody waits
        self._fail_all(error)
        self._on_lost(str(error))

    def _fail_all(self, error: JaxLLMError) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._submits.values(), *self._questions.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    async def _watch(self) -> None:
        """While the core is not there: has it given up?"""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.state == "ready":
                continue
            if self._error_path.exists():
                said = json.loads(self._error_path.read_text())
                self._stop(_error(said["error"], said["message"]))
            elif not os.path.exists(self._folder):
                self._stop(EngineDeadError("the engine process was stopped by its owner"))

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise EngineDeadError(f"the engine is {self.state}; try again when it is ready")

    # What is said and heard

    def _send(self, message: Message) -> None:
        self._send_frame(encode(message))

    def _send_frame(self, frame: bytes) -> None:
        self._socket.send(frame, zmq.NOBLOCK)
        if _has_news(self._socket):  # for which its file descriptor may not wake us any more
            self._plan_read()

    def _plan_read(self) -> None:
        if not self._is_read_planned:
            self._is_read_planned = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Hears what has come. The file descriptor tells of news once, so all is read, now or soon."""
        self._is_read_planned = False
        socket, number = self._socket, 0
        if socket.closed:
            return
        for _ in range(_MAX_MESSAGES):
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = decode_to_client(frame)
            if isinstance(message, Tokens | Heartbeat):
                number = message.number
            self._hear(message)
            if socket is not self._socket or self.state == "stopped":
                return
        else:
            self._plan_read()
        if number:
            self._loop.call_soon(self._acknowledge, number)  # after what the news have set going

    def _acknowledge(self, number: int) -> None:
        if self.state == "ready":
            self._send(Ack(number))

    def _hear(self, message: Message) -> None:
        self._last_heard = time.monotonic()
        match message:
            case Tokens():
                self._on_output(message.output)
            case Heartbeat():
                self.stats = message.stats
            case Taken():
                _resolve(self._submits, message.handle, None)
            case Refused():
                error = _error(message.error, message.message, message.retry_after_s)
                _resolve(self._submits, message.handle, error)
            case Answer():
                if message.error is None:
                    _resolve(self._questions, message.number, message.value)
                else:
                    _resolve(self._questions, message.number, _error(message.error, message.message))
            case Ready():
                self.info, self.stats = message.info, message.stats
                self.state = "ready"
                if not self._ready.done():
                    self._ready.set_result(None)
            case Forgotten():
                self._lose("the engine process does not know this client any more")


def _has_news(socket: zmq.Socket[bytes]) -> bool:
    """Whether something can be read. If not, its file descriptor tells when."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _resolve(futures: dict[int, asyncio.Future[Any]], number: int, value: Any) -> None:
    """Tells who waits for `number`, unless they have gone."""
    future = futures.get(number)
    if future is None or future.done():
        return
    if isinstance(value, JaxLLMError):
        future.set_exception(value)
    else:
        future.set_result(value)


def _error(name: str, message: str, retry_after_s: float | None = None) -> JaxLLMError:
    """The error of this name in `jaxllm.errors`."""
    kind: type[JaxLLMError] = getattr(jaxllm.errors, name)
    return OverloadedError(message, retry_after_s) if kind is OverloadedError else kind(message)
