"""Reads server-sent events from a body that comes in pieces."""

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class SseReader:
    """Invariant to how the body is cut. Lines end with LF, CRLF or CR, and nothing else. Comments and fields other than
    `data` are left out, as is a byte-order mark at the start."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_start = True
        self._ended_with_cr = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that this piece completes."""
        if self._ended_with_cr and piece:  # which was a line's end already
            piece = piece.removeprefix(b"\n")
            self._ended_with_cr = False
        if b"\r" in piece:
            self._ended_with_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._rest + piece
        if self._is_start and len(text) >= len(_BOM):
            self._is_start, text = False, text.removeprefix(_BOM)
        *events, self._rest = text.split(b"\n\n")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
