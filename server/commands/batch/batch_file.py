"""The files of a batch, in OpenAI's format: a request in each line of the input, its answer in that of the output."""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from jaxllm import ConfigError
from jaxllm.server.commands.client.http_response import Response
from jaxllm.server.commands.terminal import OutputError

_BOM = b"\xef\xbb\xbf"
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # what a decoder raises, UnicodeDecodeError included


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input. body: an object, as it was written."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Named(msgspec.Struct):
    custom_id: str


class _Status(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    """A line of the output, as far as it matters here."""

    custom_id: str | None
    response: _Status | None
    error: msgspec.Raw


class BadLineError(Exception):
    """A line of the input that is no request. custom_id: if it has one."""

    def __init__(self, message: str, custom_id: str | None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


_read_request = msgspec.json.Decoder(BatchRequest).decode
_read_body = msgspec.json.Decoder(dict[str, Any]).decode
_read_named = msgspec.json.Decoder(_Named).decode
_read_written = msgspec.json.Decoder(_Written).decode


class BatchInput:
    """The lines that are not empty, without a byte-order mark. `parse` is called for each, in order: it finds a
    custom_id that comes twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._custom_ids: set[str] = set()

    def lines(self) -> Iterator[bytes]:
        """Raises ConfigError: the file cannot be read."""
        try:
            with open(self._path, "rb") as file:
                yield from (text for line in file if (text := line.strip().removeprefix(_BOM)))
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error

    def parse(self, line: bytes) -> BatchRequest:
        """Raises BadLineError."""
        try:
            request = _read_request(line)
            body = _read_body(request.body)
        except _UNREADABLE as error:
            raise BadLineError(f"this line is not a request of a batch: {error}", custom_id_of(line)) from error
        custom_id = request.custom_id
        if custom_id in self._custom_ids:
            raise BadLineError(f"custom_id {custom_id!r} is also that of an earlier line", custom_id)
        self._custom_ids.add(custom_id)
        if request.method != "POST":
            raise BadLineError(f"method is {request.method!r}; it must be POST", custom_id)
        if not request.url.startswith("/v1/") or not request.url.isascii() or not request.url.isprintable():
            raise BadLineError(f"url is {request.url!r}; it must be a path such as /v1/chat/completions", custom_id)
        if body.get("stream"):
            raise BadLineError("body.stream is true; a batch has whole answers only", custom_id)
        return request


class BatchOutput:
    """The answers, line by line in the order of the input: line n answers request n.

    What the file has is kept: `num_done` lines. A last line that is torn, as after a crash, is cut off.

    Raises ConfigError: the file has something else in it, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failed = 0
        self.custom_ids: list[str | None] = []
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is no file; name one with -o, or a name that is free")
            self._file = open(path, "r+b" if path.exists() else "x+b")  # noqa: SIM115
            self._read()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error

    @property
    def num_done(self) -> int:
        return len(self.custom_ids)

    def write(self, custom_id: str | None, answer: Response | Exception) -> None:
        """The answer, or what kept it from coming: then it counts as failed, as does any status but 200."""
        line = _answer_line(custom_id, answer)
        try:
            self._file.write(line)
            self._file.flush()
            is_there = os.fstat(self._file.fileno()).st_nlink > 0
        except OSError as error:
            raise self._error(error) from error
        if not is_there:
            raise OutputError(f"{self.path} was deleted, and with it the answers so far; the same command begins anew")
        self.num_failed += not (isinstance(answer, Response) and answer.status == 200)
        self.custom_ids.append(custom_id)

    def close(self) -> None:
        """Raises OutputError if the last answers could not be written after all."""
        try:
            self._file.close()
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> OutputError:
        return OutputError(f"{self.path} cannot be written: {error.strerror}. What was written is whole.")

    def _read(self) -> None:
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                answer = _read_written(line.removeprefix(_BOM))
                self.custom_ids.append(answer.custom_id)
                self.num_failed += answer.response is None or answer.response.status_code != 200
            except _UNREADABLE as error:
                number = self.num_done + 1
                self._file.close()
                raise ConfigError(
                    f"{self.path} has a line {number:,} that is not an answer of a batch, so nothing is added to it; "
                    "name another file with -o, or remove it"
                ) from error
            end += len(line)
        self._file.seek(end)
        self._file.truncate()


def custom_id_of(line: bytes) -> str | None:
    """Of a line that may be anything; the same for all who ask. None also for one with half a character in it, which no
    file of JSON can hold."""
    with suppress(*_UNREADABLE):
        return _read_named(line).custom_id
    with suppress(*_UNREADABLE, TypeError, KeyError):  # which Python reads nevertheless, such as a line with NaN
        custom_id = json.loads(line)["custom_id"]
        return custom_id if isinstance(custom_id, str) and custom_id.encode() else None
    return None


def _answer_line(custom_id: str | None, answer: Response | Exception) -> bytes:
    response, error = None, None
    if isinstance(answer, Response):
        body: msgspec.Raw | str
        try:
            body = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(answer.body)))
        except (*_UNREADABLE, OverflowError):
            body = answer.body.decode(errors="replace")
        response = {"status_code": answer.status, "request_id": answer.headers.get("x-request-id", ""), "body": body}
    else:
        code = "invalid_request" if isinstance(answer, BadLineError) else "no_answer"
        error = {"code": code, "message": str(answer)}
    fields = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


def same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and os.path.samefile(one, other)
