"""`jaxllm serve` in a process of its own, over the stub engine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

_PROGRAM = """\
import signal
import sys
from jaxllm import EngineConfig, JaxLLMError
from jaxllm.server.commands.serve import serve
from jaxllm.server.server_config import ServerConfig
if __name__ == "__main__":  # API workers import this file again
    engine_options, options, engine, ignored = eval(sys.argv[1])
    # Else as the tests' own process takes them, in which libtpu may have had SIGHUP ignored, or who started it.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, signal.SIG_IGN if number == ignored else handler)
    serve(EngineConfig(**engine_options), ServerConfig(**options), engine=engine)
"""


class ServeProcess:
    """ignored: a signal that its parent has it ignore, as nohup does with SIGHUP.

    url: as its start-up line tells it. lines: of its stderr so far. processes: it and all its children, at the time
    when it was ready."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        engine: str = "stub_engine:StubEngine",
        wait: bool = True,
        engine_options: dict[str, Any] | None = None,
        ignored: int | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder  # also for temporary files
        program = folder / "serve_stub.py"
        program.write_text(_PROGRAM)
        arguments = (
            {"model": str(model)} | (engine_options or {}),
            {"port": 0, "served_model_name": ["stub"]} | options,
            engine,
            None if ignored is None else int(ignored),
        )
        self.process = subprocess.Popen(
            [sys.executable, str(program), repr(arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(folder)},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if wait:
            self.wait_for(lambda: self.url, 60.0)
        self.processes = self.find_processes()

    def find_processes(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find_workers(self) -> list[psutil.Process]:
        """The API workers, where there are several."""
        return [p for p in self.find_processes()[1:] if "spawn_main" in " ".join(p.cmdline())]

    def wait_for(self, condition: Any, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time; the log is\n" + "".join(self.lines)
            assert self.process.poll() is None, "the server has ended; the log is\n" + "".join(self.lines)
            time.sleep(0.02)

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(10.0)
        return code

    def assert_no_orphans(self, timeout_s: float = 10.0) -> None:
        """All processes that there were end, by themselves."""
        _, alive = psutil.wait_procs(self.processes, timeout_s)
        assert not alive

    def close(self) -> None:
        """Whatever happened."""
        for process in {*self.processes, *self.find_processes()}:
            if process.is_running():
                process.kill()
        self.process.wait(10.0)
        self._reader.join(10.0)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"serving at (http\S+)/v1", line):
                self.url = match[1]
