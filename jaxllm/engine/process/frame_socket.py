"""Whole messages over a local stream socket, without waiting."""

import socket

MAX_FRAME_BYTES = 1 << 28
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18  # no less than the system's buffer of a local socket


class FrameSocket:
    """One end of a connection. A frame is its length, four bytes, and what it holds.

    Nothing here waits: what the other end has no room for is kept, and what has come in part stays until the rest has.
    A connection that has ended is noticed by `receive` alone; whatever was sent in between is lost.
    """

    def __init__(self, stream: socket.socket):
        """stream: connected; it is this object's from now on."""
        stream.setblocking(False)
        self._stream = stream
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @classmethod
    def connect(cls, path: str) -> "FrameSocket":
        """Raises OSError if nobody listens there."""
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.setblocking(False)
            stream.connect(path)
        except OSError:
            stream.close()
            raise
        return cls(stream)

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether to call `flush` when the socket can be written."""
        return bool(self._outgoing)

    def send(self, frame: bytes) -> None:
        """Raises OverflowError if the frame is longer than `MAX_FRAME_BYTES`."""
        if len(frame) > MAX_FRAME_BYTES:
            raise OverflowError(f"the message has {len(frame):,} bytes; the limit is {MAX_FRAME_BYTES:,}")
        self._outgoing += len(frame).to_bytes(_LENGTH_BYTES)
        self._outgoing += frame
        self.flush()

    def flush(self) -> None:
        """Sends what is unsent, as far as the other end has room."""
        try:
            while self._outgoing:
                num_sent = self._stream.send(self._outgoing)
                del self._outgoing[:num_sent]
        except BlockingIOError:
            pass
        except OSError:  # The connection has ended.
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """The frames that have come, as far as one look at the socket shows.

        Raises ConnectionError when the connection has ended, or carries what are no frames.
        """
        try:
            data = self._stream.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        incoming, frames, start = self._incoming, list[bytes](), 0
        incoming += data
        while len(incoming) >= start + _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            length = int.from_bytes(incoming[start:begin])
            if length > MAX_FRAME_BYTES:
                raise ConnectionAbortedError(
                    f"a frame of {length:,} bytes is announced; the limit is {MAX_FRAME_BYTES:,}"
                )
            if len(incoming) < begin + length:
                break
            start = begin + length
            frames.append(bytes(incoming[begin:start]))
        del incoming[:start]
        return frames

    def close(self) -> None:
        self._stream.close()
