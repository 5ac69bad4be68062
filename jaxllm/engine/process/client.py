"""An event loop's connection to a core process."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any, Literal

import jaxllm.errors
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.process.frame_socket import FrameSocket
from jaxllm.engine.process.messages import (
    Ack,
    Answer,
    End,
    EndReason,
    Heartbeat,
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
from jaxllm.engine.process.owner import error_path
from jaxllm.errors import EngineDeadError, InvalidRequestError, JaxLLMError, OverloadedError

State = Literal["starting", "ready", "restarting", "stopped"]

_RETRY_S = 0.05  # how often to look for a core, or why there is none, while nobody listens


class CoreClient:
    """Connects whenever a core listens at the address, and hears what it says.

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
        self._last_heard = time.monotonic()
        self._ready = self._loop.create_future()  # done when the core is ready, or will never be
        self._submits: dict[int, asyncio.Future[None]] = {}  # by the first handle
        self._unheard: dict[int, Callable[[], None]] = {}  # by the first handle: of submits that were cancelled
        self._questions: dict[int, asyncio.Future[bool]] = {}  # by the number
        self._numbers = itertools.count(1)
        self._connection: FrameSocket | None = None
        self._connecting = self._loop.create_task(self._connect())

    @property
    def heartbeat_age_s(self) -> float:
        """Since the core was last heard of; while it is in a step, it is silent."""
        return time.monotonic() - self._last_heard

    async def wait_until_ready(self) -> None:
        """Raises what the core could not start because of, or EngineDeadError if nobody is going to start it."""
        await asyncio.shield(self._ready)

    async def submit(
        self, handles: list[int], seeds: list[int | None], request: CoreRequest, *, forget: Callable[[], None]
    ) -> None:
        """Returns when the core has queued the request for each of the handles.

        forget: called when it is certain that the core does not know the handles: before this raises something, or,
            after it was cancelled, when the core's refusal comes. If that does not come, the ends of the handles do.

        Raises InvalidRequestError, OverloadedError, or EngineDeadError.
        """
        try:
            self._require_ready()
            try:
                frame = encode(Submit(handles, seeds, request))
            except (OverflowError, TypeError, UnicodeEncodeError) as error:
                raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
            taken = self._submits[handles[0]] = self._loop.create_future()
            self._send_frame(frame)
            await taken
        except asyncio.CancelledError:
            if taken.cancelled():
                self._unheard[handles[0]] = forget
            elif taken.exception() is not None:
                forget()
            self.end(handles, "abort")
            raise
        except Exception:
            forget()
            raise
        finally:
            self._submits.pop(handles[0], None)

    def end(self, handles: list[int], reason: EndReason) -> None:
        """Tells the core that nobody wants more of these. Their ends come as those of others do."""
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
        if self.state != "stopped":
            self._stop(EngineDeadError("the connection to the engine has been closed"))

    # The connection

    async def _connect(self) -> None:
        """Waits for a core to listen, unless none ever will."""
        while True:
            try:
                self._connection = FrameSocket.connect(self.address)
            except OSError:
                if self._error_path.exists():
                    said = json.loads(self._error_path.read_text())
                    self._stop(_error(said["error"], said["message"]))
                elif not self._error_path.parent.exists():
                    self._stop(EngineDeadError("the engine process was stopped by its owner"))
                await asyncio.sleep(_RETRY_S)
            else:
                self._loop.add_reader(self._connection.fileno(), self._read)
                return

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _lose(self, reason: str) -> None:
        """Forgets all requests, and waits for the next core."""
        self._disconnect()
        if self.state == "ready":
            self.state = "restarting"
            self._ready = self._loop.create_future()
            self.num_lost += 1
        self._fail_all(EngineDeadError(reason))
        self._connecting = self._loop.create_task(self._connect())
        self._on_lost(reason)

    def _stop(self, error: JaxLLMError) -> None:
        """Nothing will come any more."""
        self.state = "stopped"
        self._connecting.cancel()
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
        self._unheard.clear()

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise EngineDeadError(f"the engine is {self.state}; try again when it is ready")

    # What is said and heard

    def _send(self, message: Message) -> None:
        self._send_frame(encode(message))

    def _send_frame(self, frame: bytes) -> None:
        assert self._connection is not None
        self._connection.send(frame)
        if self._connection.has_unsent:
            self._loop.add_writer(self._connection.fileno(), self._flush)

    def _flush(self) -> None:
        assert self._connection is not None
        self._connection.flush()
        if not self._connection.has_unsent:
            self._loop.remove_writer(self._connection.fileno())

    def _read(self) -> None:
        """Hears what has come."""
        connection, number = self._connection, 0
        assert connection is not None
        try:
            frames = connection.receive()
        except ConnectionError:
            self._lose("the engine process has ended, or has closed the connection")
            return
        for frame in frames:
            message = decode_to_client(frame)
            if isinstance(message, Tokens | Heartbeat):
                number = message.number
            self._hear(message)
            if connection is not self._connection:
                return
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
                self._unheard.pop(message.handle, None)
                _resolve(self._submits, message.handle, None)
            case Refused():
                self._unheard.pop(message.handle, _nobody)()
                error = _error(message.error, message.message, message.retry_after_s, message.param)
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


def _resolve(futures: dict[int, asyncio.Future[Any]], number: int, value: Any) -> None:
    """Tells who waits for `number`, unless they have gone."""
    future = futures.get(number)
    if future is None or future.done():
        return
    if isinstance(value, JaxLLMError):
        future.set_exception(value)
    else:
        future.set_result(value)


def _error(name: str, message: str, retry_after_s: float | None = None, param: str | None = None) -> JaxLLMError:
    """The error of this name in `jaxllm.errors`."""
    kind: type[JaxLLMError] = getattr(jaxllm.errors, name)
    if kind is OverloadedError:
        return OverloadedError(message, retry_after_s)
    return InvalidRequestError(message, param=param) if kind is InvalidRequestError else kind(message)


def _nobody() -> None:
    """Nobody has left before the answer."""
