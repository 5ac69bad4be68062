"""What a process logs, and how. Each test has a process, for logging is set up once in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """\
import logging, sys
from pathlib import Path
from jaxllm.server.board import Board
from jaxllm.server.observability.logs import set_up_engine_logging
board_path, log_format = Path(sys.argv[1]), sys.argv[2]
set_up_engine_logging(log_format, "info", board_path, 1)
logger, other = logging.getLogger("jaxllm.engine"), logging.getLogger("a library")
for level in (0, logging.ERROR, logging.DEBUG):
    Board(1, board_path).log_level = level
    logger.debug("debug at %d", level)
    logger.info("info at %d", level)
    logger.error("error at %d", level)
other.info("never")
other.warning("a warning")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_engines_process_logs_what_the_board_says(tmp_path: Path, log_format: str):
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "board"), log_format]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr.splitlines()
    if log_format == "json":
        messages = [json.loads(line)["message"] for line in lines]
    else:
        messages = [line.partition(" engine: ")[2] for line in lines]
    assert messages == [
        *("info at 0", "error at 0", "error at 40", "debug at 10", "info at 10", "error at 10"),
        "a warning",
    ]
