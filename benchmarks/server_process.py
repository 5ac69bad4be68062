"""A server that is measured: a process with one HTTP worker, and its engine's process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.05
START_S = 300.0


@dataclass
class ServerProcess:
    """pid: of the HTTP worker."""

    url: str
    pid: int

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far: of the HTTP worker, and of the engine's process (Linux)."""
        children = [pid for task in Path(f"/proc/{self.pid}/task").iterdir() for pid in _children(task)]
        return _cpu_s(self.pid), sum(map(_cpu_s, children))

    def wait_until_quiet(self, timeout_s: float = 300.0) -> None:
        """Until the engine compiles nothing more in the background: it uses no CPU for a second."""
        deadline = time.monotonic() + timeout_s
        before = self.cpu_s()[1]
        while time.monotonic() < deadline:
            time.sleep(1.0)
            before, now = self.cpu_s()[1], before
            if before - now < QUIET:
                return
        raise SystemExit(f"the engine is still busy after {timeout_s:g} s")


@contextlib.contextmanager
def server(
    arguments: Sequence[str],
    command: Sequence[str] = ("-m", "jaxllm.server.commands.cli", "serve"),
    env: Mapping[str, str] = {},
) -> Iterator[ServerProcess]:
    """`jaxllm serve` with these arguments, or another Python command that takes --port; it ends with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *command, *arguments, "--port", str(port), "--log-level", "warning"],
        env=os.environ | dict(env),
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(process, url)
        yield ServerProcess(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _children(task: Path) -> list[int]:
    return list(map(int, (task / "children").read_text().split()))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_until_it_answers(process: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server does not answer at {url}")
