"""Reads server-sent events from a body that comes in pieces."""

from collections.abc import Iterator


class SseReader:
    """Invariant to how the body is cut. Comments and fields other than `data` are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that this piece completes."""
        text = self._rest + piece
        if b"\r" in text:
            # A "\r" at the end may be half of a line's end.
            text, held = (text[:-1], b"\r") if text.endswith(b"\r") else (text, b"")
            text = text.replace(b"\r\n", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
