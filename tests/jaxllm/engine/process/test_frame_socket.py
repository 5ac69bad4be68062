"""Frames arrive whole and in order, however the stream is cut, and nothing waits."""

import socket

import pytest

from jaxllm.engine.process import frame_socket
from jaxllm.engine.process.frame_socket import FrameSocket

FRAMES = [b"a", b"", b"x" * 1000, bytes(range(256)), b"end"]


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    yield FrameSocket(left), right
    left.close()
    right.close()


def on_the_wire(frames):
    return b"".join(len(frame).to_bytes(4) + frame for frame in frames)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 10_000])
def test_frames_are_the_same_however_the_stream_is_cut(ends, size):
    receiver, stream = ends
    sent, received = on_the_wire(FRAMES), []
    for start in range(0, len(sent), size):
        stream.sendall(sent[start : start + size])
        received += receiver.receive()
    assert received == FRAMES
    assert receiver.receive() == []


def test_what_there_is_no_room_for_is_sent_later(ends):
    sender, stream = ends
    receiver = FrameSocket(stream)
    large = bytes(range(256)) * 16_384  # 4 MiB: no socket holds so much
    sender.send(b"first")
    sender.send(large)
    sender.send(b"last")
    assert sender.has_unsent
    received = []
    for _ in range(1000):
        received += receiver.receive()
        sender.flush()
        if len(received) == 3:
            break
    assert received == [b"first", large, b"last"]
    assert not sender.has_unsent


def test_the_end_of_a_connection_is_told_after_what_was_sent_before(ends):
    receiver, stream = ends
    stream.sendall(on_the_wire([b"last words"]) + b"\0\0")
    stream.close()
    receiver.send(b"to nobody")  # No error: it is not here that one hears of it.
    assert not receiver.has_unsent
    assert receiver.receive() == [b"last words"]
    with pytest.raises(ConnectionResetError):
        receiver.receive()


def test_what_is_too_long_is_neither_sent_nor_waited_for(ends, monkeypatch):
    monkeypatch.setattr(frame_socket, "MAX_FRAME_BYTES", 1000)
    receiver, stream = ends
    sender = FrameSocket(stream)
    with pytest.raises(OverflowError, match="1,001 bytes; the limit is 1,000"):
        sender.send(b"x" * 1001)
    sender.send(b"x" * 1000)
    assert receiver.receive() == [b"x" * 1000]
    stream.send(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ConnectionAbortedError, match="the limit is 1,000"):
        receiver.receive()


def test_nobody_listens(tmp_path):
    with pytest.raises(FileNotFoundError):
        FrameSocket.connect(str(tmp_path / "nowhere"))
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(str(tmp_path / "former"))
    with pytest.raises(ConnectionRefusedError):
        FrameSocket.connect(str(tmp_path / "former"))
