"""What a core process and its clients say to each other, as msgpack.

    client                                       core
    Hello ──────────────────────────────────────►
                                        ◄─────── Ready        what the engine is
    Submit(handles) ────────────────────────────►
                                        ◄─────── Taken, or Refused
                                        ◄─────── Tokens       one for each step that brought the client something
                                        ◄─────── Heartbeat    at least every 100 ms, but not in the middle of a step
    Ack(number) ────────────────────────────────►              of both, the latest received
    End(handles), Call, Goodbye ────────────────►
                                        ◄─────── Answer       to a Call
                                        ◄─────── Forgotten    the core does not know this client (any more)

A client knows its requests by numbers of its own, the handles. `Tokens` whose handles it has forgotten mean nothing.
"""

from typing import Literal

import msgspec

from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats

EndReason = Literal["abort", "stop"]


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One message; on the wire, an array that begins with its name."""


class Hello(Message):
    """I am here; what are you?"""


class Submit(Message):
    """Continue one prompt, once for each handle; all are taken, or none. `request.seed` gives way to `seeds`."""

    handles: list[int]
    seeds: list[int | None]
    request: CoreRequest


class End(Message):
    """The client wants to hear no more of these."""

    handles: list[int]
    reason: EndReason


class Call(Message):
    """A question or command, whose Answer has the same number."""

    number: int
    name: Literal["abort", "reset_prefix_cache", "profile"]
    argument: str | bool | None = None


class Ack(Message):
    """Received, up to this number."""

    number: int


class Goodbye(Message):
    """The client leaves, and its requests with it."""


class Ready(Message):
    info: EngineInfo


class Taken(Message):
    """The requests of a Submit, told by its first handle, are queued."""

    handle: int


class Refused(Message):
    """They are not. `error` is the name of one of `jaxllm.errors`."""

    handle: int
    error: str
    message: str
    retry_after_s: float | None = None


class Tokens(Message):
    """What steps have brought. Its keys are handles."""

    number: int
    output: CoreOutput


class Heartbeat(Message):
    number: int
    stats: EngineStats


class Answer(Message):
    """`error` is the name of one of `jaxllm.errors`, with its message, if the call failed."""

    number: int
    value: bool = True
    error: str | None = None
    message: str = ""


class Forgotten(Message):
    """Whatever the client still expects will not come. It may say Hello again."""


ToCore = Hello | Submit | End | Call | Ack | Goodbye
ToClient = Ready | Taken | Refused | Tokens | Heartbeat | Answer | Forgotten

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
