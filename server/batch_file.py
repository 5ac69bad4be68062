"""The files of a batch, in OpenAI's format: a request in each line of the input, its answer in that of the output."""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxllm import ConfigError
from jaxllm.server.http_response import Response


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BadLineError(Exception):
    """A line of the input that is no request. custom_id: if it has one."""

    def __init__(self, message: str, custom_id: str | None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


_read_request = msgspec.json.Decoder(BatchRequest).decode


class BatchInput:
    """The lines that are not empty. `parse` is called for each, in order: it finds a custom_id that comes twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._custom_ids: set[str] = set()

    def lines(self) -> Iterator[bytes]:
        """Raises ConfigError: the file cannot be read."""
        try:
            with open(self._path, "rb") as file:
                yield from (line for line in file if line.strip())
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error}") from error

    def parse(self, line: bytes) -> BatchRequest:
        """Raises BadLineError."""
        try:
            request = _read_request(line)
        except msgspec.DecodeError as error:
            raise BadLineError(f"this line is not a request of a batch: {error}", custom_id_of(line)) from error
        custom_id = request.custom_id
        if custom_id in self._custom_ids:
            raise BadLineError(f"custom_id {custom_id!r} is also that of an earlier line", custom_id)
        self._custom_ids.add(custom_id)
        if request.method != "POST":
            raise BadLineError(f"method is {request.method!r}; it must be POST", custom_id)
        if not request.url.startswith("/v1/") or not request.url.isascii() or not request.url.isprintable():
            raise BadLineError(f"url is {request.url!r}; it must be a path such as /v1/chat/completions", custom_id)
        if request.body.get("stream"):
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
            self._file = open(path, "r+b" if path.exists() else "x+b")  # noqa: SIM115
            self._read()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error

    @property
    def num_done(self) -> int:
        return len(self.custom_ids)

    def write(self, custom_id: str | None, answer: Response | Exception) -> None:
        """The answer, or what kept it from coming: then it counts as failed, as does any status but 200."""
        self.num_failed += not (isinstance(answer, Response) and answer.status == 200)
        self.custom_ids.append(custom_id)
        self._file.write(_answer_line(custom_id, answer))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                answer = json.loads(line)
                self.custom_ids.append(answer["custom_id"])
                response, _ = answer["response"], answer["error"]
                self.num_failed += response is None or response["status_code"] != 200
            except (ValueError, TypeError, KeyError) as error:
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
    """Of a line that may be anything."""
    try:
        custom_id = json.loads(line)["custom_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return custom_id if isinstance(custom_id, str) else None


def _answer_line(custom_id: str | None, answer: Response | Exception) -> bytes:
    response, error = None, None
    if isinstance(answer, Response):
        try:
            body = msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            body = answer.body.decode(errors="replace")
        response = {"status_code": answer.status, "request_id": answer.headers.get("x-request-id", ""), "body": body}
    else:
        code = "invalid_request" if isinstance(answer, BadLineError) else "no_answer"
        error = {"code": code, "message": str(answer)}
    fields = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


def same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and os.path.samefile(one, other)
