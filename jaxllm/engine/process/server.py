"""What a core process says to its clients, and hears from them, between the steps of its core."""

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from jaxllm.engine.core import Core, add_choices
from jaxllm.engine.core_output import CoreOutput, Key
from jaxllm.engine.process.frame_socket import FrameSocket
from jaxllm.engine.process.messages import (
    Abort,
    Ack,
    Answer,
    End,
    Heartbeat,
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
from jaxllm.errors import InvalidRequestError, JaxLLMError, OverloadedError

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 0.1
_WINDOW = 4  # messages of tokens on their way to a client; while it has not received them, further tokens merge
_MAX_SILENT_BEATS = 300  # to a client that is connected and receives nothing: 30 s, or more while steps are long
_LISTEN_S = 0.01  # between two steps


class _Client:
    """One connection, and the requests that came through it."""

    def __init__(self, connection: FrameSocket):
        self.connection = connection
        self.num_silent_beats = 0  # since it was last heard
        self.keys: dict[int, str] = {}  # what the core calls the requests, by the client's handles
        self.num_sent = 0  # messages that are to be acknowledged
        self.num_acknowledged = 0
        self.num_tokens_sent = 0  # of them, the last that had tokens
        self.merged: CoreOutput | None = None  # while the window is full


@dataclass
class _Owner:
    """Whose a request is, and what it is called there."""

    client: _Client
    handle: int
    name: str


class CoreServer:
    """Serves the clients of one core, in one thread: takes in what they say between steps.

    Args:
      core: what runs the steps.
      listener: where clients connect; it is closed with the server.
      is_stopping: asked between steps; true ends `run`.
    """

    def __init__(self, core: Core, listener: socket.socket, is_stopping: Callable[[], bool]):
        self._core = core
        self._listener = listener
        self._is_stopping = is_stopping
        self._clients: set[_Client] = set()
        self._owners: dict[Key, _Owner] = {}  # by the request_id that the core knows
        self._arrived: deque[tuple[_Client, bytes]] = deque()  # frames that are to be taken in
        self._next_beat = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        while not self._is_stopping():
            self._beat()
            self._listen()
            if self._core.has_unfinished_requests:
                self._report(self._step())

    def close(self) -> None:
        """Ends all connections."""
        for client in list(self._clients):
            self._part(client)
        self._selector.close()
        self._listener.close()

    def _step(self) -> CoreOutput:
        try:
            return self._core.step()
        except Exception as error:
            logger.exception("a step failed; the requests that were in it end")
            return self._core.recover(error)

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
        parts: dict[_Client, CoreOutput] = {}

        def part_of(owner: _Owner) -> CoreOutput:
            found = parts.get(owner.client)
            if found is None:
                found = parts[owner.client] = CoreOutput(output.time)
            return found

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
        return list(parts.items())

    def _of_one_client(self, output: CoreOutput) -> tuple[_Client, CoreOutput]:
        """What `_by_client` gives when there is one client; quicker."""
        (client,) = self._clients
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
        self._next_beat = now + _HEARTBEAT_S
        if not self._clients:
            return
        stats = self._core.stats()
        for client in list(self._clients):
            if client.num_silent_beats >= _MAX_SILENT_BEATS:
                logger.warning("a client has not confirmed any of %d heartbeats; its requests end", _MAX_SILENT_BEATS)
                self._part(client)
            else:
                client.num_silent_beats += 1
                client.num_sent += 1
                self._send(client, Heartbeat(client.num_sent, stats))

    def _send(self, client: _Client, message: Message) -> None:
        client.connection.send(encode(message))
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        """Has the selector tell what there is to do for the connection."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.connection.has_unsent else 0)
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, client)

    def _part(self, client: _Client) -> None:
        """Ends a connection and all of its requests."""
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        for key in list(client.keys.values()):
            self._forget_request(key)
            self._core.end_request(key, "abort")

    # From the clients

    def _listen(self) -> None:
        """Takes in what has been said, for so long only as does not hold up the steps. While nothing runs, waits for it
        until the next heartbeat is due."""
        wait_s = 0.0 if self._core.has_unfinished_requests else max(0.0, self._next_beat - time.monotonic())
        if not self._arrived and not self._gather(wait_s):
            return
        end = time.monotonic() + _LISTEN_S
        while self._arrived or self._gather(0.0):
            client, frame = self._arrived.popleft()
            if client in self._clients:
                self._take_in(client, frame)
            if time.monotonic() > end:
                return

    def _gather(self, wait_s: float) -> bool:
        """Looks at all connections once, when there is something to see or after `wait_s`. Whether frames arrived."""
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            client: _Client = key.data
            if events & selectors.EVENT_WRITE:
                client.connection.flush()
                self._watch(client)
            if events & selectors.EVENT_READ:
                client.num_silent_beats = 0
                try:
                    self._arrived += [(client, frame) for frame in client.connection.receive()]
                except ConnectionAbortedError as error:
                    logger.error("a client sent what is no message: %s", error)
                    self._part(client)
                except ConnectionError:
                    self._part(client)
        return bool(self._arrived)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:  # It has gone already, or there is no room for another.
            return
        client = _Client(FrameSocket(stream))
        self._clients.add(client)
        self._selector.register(client.connection, selectors.EVENT_READ, client)
        self._send(client, Ready(self._core.info, self._core.stats()))

    def _take_in(self, client: _Client, frame: bytes) -> None:
        try:
            message = decode_to_core(frame)
        except msgspec.MsgspecError as error:
            logger.error("a client sent what is no message: %s", error)
            self._part(client)
            return
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

    def _submit(self, client: _Client, message: Submit) -> None:
        first_handle = message.handles[0]
        try:
            keys = add_choices(self._core, message.request, message.seeds, key_of=self._free_key)
        except Exception as error:
            self._send(client, _refusal(first_handle, error))
            return
        for handle, key in zip(message.handles, keys, strict=True):
            self._owners[key] = _Owner(client, handle, message.request.request_id)
            client.keys[handle] = key
        self._send(client, Taken(first_handle))

    def _free_key(self, name: str) -> str:
        """`name`, or with a number behind it if another client calls its request the same."""
        key, number = name, 2
        while key in self._owners:
            key, number = f"{name}~{number}", number + 1
        return key

    def _end(self, client: _Client, message: End) -> None:
        for handle in message.handles:
            if (key := client.keys.get(handle)) is None:  # It has ended by itself, which the client will hear.
                continue
            if (output := self._core.end_request(key, message.reason)) is not None:
                self._report(output)

    def _forget_request(self, key: Key) -> None:
        owner = self._owners.pop(key)
        del owner.client.keys[owner.handle]

    def _answer_to(self, question: Question) -> Answer:
        value = True
        try:
            match question:
                case Abort():
                    value = self._abort(question.name)
                case ResetPrefixCache():
                    value = self._core.reset_prefix_cache(force=question.force)
                case Profile():
                    self._core.profile(question.folder)
        except Exception as error:
            if not isinstance(error, JaxLLMError):
                logger.exception("%s failed", question)
            return Answer(question.number, False, *described(error))
        return Answer(question.number, value)

    def _abort(self, name: str) -> bool:
        """Ends the requests of this name, whosever they are; their owners are told."""
        keys = [key for client in self._clients for key in client.keys.values() if self._owners[key].name == name]
        for key in keys:
            if (output := self._core.end_request(key, "abort")) is not None:
                self._report(output)
        return bool(keys)


def described(error: Exception, otherwise: type[JaxLLMError] = JaxLLMError) -> tuple[str, str]:
    """Which of our errors it is to the client, and its message. An error that is not ours becomes `otherwise`."""
    if isinstance(error, JaxLLMError):
        return type(error).__name__, str(error)
    return otherwise.__name__, f"the engine raised {type(error).__name__}: {error}"


def _refusal(handle: int, error: Exception) -> Refused:
    if isinstance(error, OverloadedError):
        return Refused(handle, "OverloadedError", str(error), error.retry_after_s)
    if not isinstance(error, InvalidRequestError):
        logger.error("a request could not be added", exc_info=error)
    return Refused(handle, *described(error), param=getattr(error, "param", None))
