"""How events reach a connection. The engine is whoever calls `Source.push`."""

import asyncio
import contextlib

import pytest

from jaxllm import OutputDelta
from jaxllm.server.api.answers.event_stream import KEEP_ALIVE, EventStream
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.client_watch import ClientLeftError


class Source:
    """Gives what is pushed; an error is raised when it is taken."""

    num_choices = 1

    def __init__(self) -> None:
        self.is_complete = False
        self.num_closes = 0
        self._waiting: list[OutputDelta | Exception] = []
        self._on_news = lambda: None

    def listen(self, on_news) -> None:
        self._on_news = on_news

    def push(self, new: str | Exception, finish_reason: str | None = None) -> None:
        self._waiting.append(OutputDelta(0, new, [], finish_reason=finish_reason) if isinstance(new, str) else new)
        self._on_news()

    def take(self) -> OutputDelta | None:
        """What was not taken merges."""
        if not self._waiting:
            return None
        if isinstance(self._waiting[-1], Exception):
            raise self._waiting.pop()
        text, reason = "".join(delta.text for delta in self._waiting), self._waiting[-1].finish_reason
        self._waiting.clear()
        self.is_complete = reason is not None
        return OutputDelta(0, text, [], finish_reason=reason)

    def close(self) -> None:
        self.num_closes += 1


class Writer:
    """Writes the text as it is."""

    def begin(self) -> bytes:
        return b""

    def add(self, delta: OutputDelta) -> bytes:
        if delta.text == "!":
            raise RuntimeError("a defect")
        return delta.text.encode()

    async def end(self) -> bytes:
        return b"<end>"

    def fail(self, error: ApiError) -> bytes:
        return f"<{error.status}>".encode()


class Connection:
    """Keeps what was sent. `is_open` is cleared when the client reads nothing more."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.has_ended = False
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def send(self, message) -> None:
        await self.is_open.wait()
        if message["type"] == "http.response.body":
            assert not self.has_ended
            self.sent.append(message["body"])
            self.has_ended = not message["more_body"]


class Rig:
    """A stream whose first event is "a", on its connection."""

    @classmethod
    async def start(cls, keep_alive_s: float = 60.0) -> "Rig":
        rig = cls()
        rig.source, rig.connection = Source(), Connection()
        rig.source.push("a")
        rig.stream = await EventStream.start(rig.source, Writer(), keep_alive_s=keep_alive_s)
        rig.answering = asyncio.create_task(rig.stream({"path": "/"}, None, rig.connection.send))
        await asyncio.sleep(0)
        return rig

    async def assert_ended(self, *sent: bytes) -> None:
        await asyncio.wait_for(self.answering, 10.0)
        assert self.connection.sent == list(sent)
        assert self.source.num_closes


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 30.0))


def test_events_are_sent_in_the_call_that_brings_them():
    async def test() -> None:
        rig = await Rig.start()
        for text in ("b", "c"):
            rig.source.push(text)
        assert rig.connection.sent == [b"a", b"b", b"c"]
        rig.source.push("d", "stop")
        assert rig.connection.has_ended
        await rig.assert_ended(b"a", b"b", b"c", b"d", b"<end>")

    run(test)


def test_what_comes_before_the_answer_has_begun_is_not_lost():
    async def test() -> None:
        source, connection = Source(), Connection()
        source.push("a")
        stream = await EventStream.start(source, Writer(), keep_alive_s=60.0)
        source.push("b")
        source.push("c", "stop")
        await stream({"path": "/"}, None, connection.send)
        assert connection.sent == [b"a", b"bc", b"<end>"]

    run(test)


def test_a_reader_that_stops_gets_fewer_and_longer_events_and_holds_up_nobody():
    async def test() -> None:
        slow, quick = await Rig.start(), await Rig.start()
        slow.connection.is_open.clear()
        for number in range(5):
            slow.source.push(str(number))
            quick.source.push(str(number))
        assert quick.connection.sent == [b"a", b"0", b"1", b"2", b"3", b"4"]
        slow.connection.is_open.set()
        slow.source.push("5", "stop")
        await slow.assert_ended(b"a", b"0", b"12345", b"<end>")
        quick.source.push("", "stop")
        await quick.assert_ended(b"a", b"0", b"1", b"2", b"3", b"4", b"<end>")

    run(test)


def test_an_error_is_the_last_event():
    async def test() -> None:
        rig = await Rig.start()
        rig.source.push(ApiError(408, "late"))
        await rig.assert_ended(b"a", b"<408>")

    run(test)


def test_a_defect_ends_this_stream_alone_and_is_logged(caplog):
    async def test() -> None:
        rig, other = await Rig.start(), await Rig.start()
        rig.source.push("!")
        await rig.assert_ended(b"a", b"<500>")
        other.source.push("b", "stop")
        await other.assert_ended(b"a", b"b", b"<end>")

    with caplog.at_level("ERROR", "jaxllm.server"):
        run(test)
    assert "a defect" in caplog.text


def test_an_error_before_the_first_event_is_raised():
    async def test() -> None:
        source = Source()
        starting = asyncio.create_task(EventStream.start(source, Writer(), keep_alive_s=60.0))
        await asyncio.sleep(0)
        source.push(ApiError(503, "too late"))
        with pytest.raises(ApiError, match="too late"):
            await starting
        assert source.num_closes

    run(test)


def test_a_client_that_leaves_is_told_nothing_more():
    async def test() -> None:
        rig = await Rig.start()
        rig.source.push(ClientLeftError())
        await rig.assert_ended(b"a")
        assert not rig.connection.has_ended

    run(test)


def test_a_connection_that_breaks_ends_the_answer_at_once():
    async def test() -> None:
        source = Source()
        source.push("a")
        stream = await EventStream.start(source, Writer(), keep_alive_s=60.0)

        async def send(message) -> None:
            if message.get("body"):
                raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await stream({"path": "/"}, None, send)
        assert source.num_closes

    run(test)


@pytest.mark.parametrize("is_reading", [True, False])
def test_an_answer_that_is_cancelled_ends_at_once(is_reading):
    async def test() -> None:
        rig = await Rig.start()
        if not is_reading:
            rig.connection.is_open.clear()
            rig.source.push("b")
        rig.answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rig.answering
        assert rig.source.num_closes
        with contextlib.suppress(asyncio.CancelledError):
            await rig.stream._writing
        assert rig.connection.sent == [b"a"]

    run(test)


def test_silence_is_filled_with_comments():
    async def test() -> None:
        rig = await Rig.start(keep_alive_s=0.05)
        await asyncio.sleep(0.17)
        num_comments = rig.connection.sent.count(KEEP_ALIVE)
        assert 1 <= num_comments <= 3
        assert rig.connection.sent == [b"a"] + [KEEP_ALIVE] * num_comments
        rig.source.push("b", "stop")
        await rig.answering
        assert rig.connection.sent[-2:] == [b"b", b"<end>"]

    run(test)


def test_a_stream_that_speaks_needs_no_comments():
    async def test() -> None:
        rig = await Rig.start(keep_alive_s=0.2)
        for _ in range(50):
            await asyncio.sleep(0.01)
            rig.source.push("b")
        assert KEEP_ALIVE not in rig.connection.sent
        rig.answering.cancel()

    run(test)


def test_a_comment_may_come_before_the_first_event():
    async def test() -> None:
        source, connection = Source(), Connection()
        stream = await EventStream.start(source, Writer(), keep_alive_s=0.05)
        answering = asyncio.create_task(stream({"path": "/"}, None, connection.send))
        await asyncio.sleep(0)
        assert connection.sent == [KEEP_ALIVE]
        source.push(ApiError(503, "now it has to be an event"))
        await answering
        assert connection.sent == [KEEP_ALIVE, b"<503>"]

    run(test)


def test_comments_are_not_piled_up_for_a_reader_that_stops():
    async def test() -> None:
        rig = await Rig.start(keep_alive_s=0.02)
        rig.connection.is_open.clear()
        rig.source.push("b")
        await asyncio.sleep(0.2)
        rig.connection.is_open.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rig.connection.sent == [b"a", b"b"]
        rig.answering.cancel()

    run(test)
