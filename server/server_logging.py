"""Where the server's log lines go, and how they look."""

import json
import logging
import sys
from datetime import UTC, datetime

from jaxllm.server.server_config import ServerConfig

_TEXT = "%(asctime)s %(levelname)s %(message)s"


def set_up_logging(config: ServerConfig) -> None:
    """Sends the lines of jaxllm and uvicorn to stderr. The lines of requests come ready made in JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter(_TEXT))
    for name, level in (("jaxllm", config.log_level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


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
            "message": message,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
