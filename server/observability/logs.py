"""Where the server's log lines go, and how they look."""

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

from jaxllm.server.board import Board

_TEXT = "%(asctime)s %(levelname)s %(message)s"
_ENGINE_TEXT = "%(asctime)s %(levelname)s engine: %(message)s"


def set_up_logging(log_format: str, log_level: str) -> None:
    """Sends the lines of jaxllm and uvicorn to stderr. The lines of requests come ready made in JSON.

    log_format, log_level: as in `ServerConfig`.
    """
    handler = _handler(log_format, _TEXT)
    for name, level in (("jaxllm", log_level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def set_up_engine_logging(log_format: str, log_level: str, board_path: Path, num_workers: int) -> None:
    """The same in the engine's process, with the warnings of what else runs there. Its level is that of the board, as
    soon as that has one."""
    handler = _handler(log_format, _ENGINE_TEXT)
    board, level = Board(num_workers, board_path), logging.getLevelNamesMapping()[log_level.upper()]
    handler.addFilter(lambda record: record.levelno >= (board.log_level or level))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("jaxllm").setLevel(logging.DEBUG)


def _handler(log_format: str, text: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(text))
    return handler


def set_log_level(level: int) -> None:
    """Of the server's own lines; numbers as in the standard library."""
    logging.getLogger("jaxllm").setLevel(level)


class TextFormatter(logging.Formatter):
    """A message stays on its line and leaves the terminal alone, whatever a client has put into its path."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = record.message
        if not text.isprintable():
            record.message = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """An object on each line."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "jaxllm.server.requests":
            return message
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "event": "log",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
