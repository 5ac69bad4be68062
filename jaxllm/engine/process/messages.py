"""What a core process and its clients say to each other: msgpack, in the frames of a `FrameSocket`.

    client                                       core
    connects ───────────────────────────────────►
                                        ◄─────── Ready        what the engine is
    Submit(handles) ────────────────────────────►
                                        ◄─────── Taken, or Refused
                                        ◄─────── Tokens       one for each step that brought the client something
                                        ◄─────── Heartbeat    at least every 100 ms, but not in the middle of a step
    Ack(number) ────────────────────────────────►              of both, the latest received
    End(handles), a Question ───────────────────►
                                        ◄─────── Tokens       of each that had not ended: the last, and the end
                                        ◄─────── Answer       to the Question
    closes ─────────────────────────────────────►              its requests end

The core closes connections that it has no use for: whose client receives nothing any more, or says what is no message.
A client knows its requests by numbers of its own, the handles. However a request ends, its end comes with all tokens
that were not told yet, so that whoever counts them need not know why it ended.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats
from jaxllm.engine.step_command import StepCommand

EndReason = Literal["abort", "stop"]


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One message; on the wire, an array that begins with its name."""


class Submit(Message):
    """Continue one prompt, once for each handle; all are taken, or none. `request.seed` gives way to `seeds`."""

    handles: list[int]
    seeds: list[int | None]
    request: CoreRequest


class End(Message):
    """Nobody wants more of these. Their last `Tokens` have what they made until then, and that they have ended."""

    handles: list[int]
    reason: EndReason


class Question(Message):
    """Its Answer has the same number."""

    number: int


class Abort(Question):
    """End all requests of this name, of all clients; the answer is whether there were any."""

    name: str


class ResetPrefixCache(Question):
    force: bool


class Profile(Question):
    """Start a trace, to be written there; None ends it."""

    folder: str | None


class Ack(Message):
    """Received, up to this number."""

    number: int


class Ready(Message):
    info: EngineInfo
    stats: EngineStats


class Taken(Message):
    """The requests of a Submit, told by its first handle, are queued."""

    handle: int


class Refused(Message):
    """They are not. `error` is the name of one of `jaxllm.errors`."""

    handle: int
    error: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None


class Tokens(Message):
    """What steps have brought. Its keys are handles."""

    number: int
    output: CoreOutput


class Heartbeat(Message):
    number: int
    stats: EngineStats


class Answer(Message):
    """`error` is the name of one of `jaxllm.errors`, with its message, if there is no answer."""

    number: int
    value: bool = True
    error: str | None = None
    message: str = ""


ToCore = Submit | End | Abort | ResetPrefixCache | Profile | Ack
ToClient = Ready | Taken | Refused | Tokens | Heartbeat | Answer

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode


def _array(type_: type, data: Any) -> np.ndarray:
    assert type_ is np.ndarray
    return np.frombuffer(data, np.int32)


# What a core says to runners that follow its own. Their hosts are of one byte order.
encode_command = msgspec.msgpack.Encoder(enc_hook=memoryview).encode
decode_command = msgspec.msgpack.Decoder(StepCommand, dec_hook=_array).decode
