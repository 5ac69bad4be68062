"""Jobs in a child process: one that fails, ends the process, or hangs costs itself only.

A kernel that reads a wrong address leaves the whole process without a GPU, and one that waits for a barrier that never
comes leaves it without an end; so no job is run by the process that has to print the tables.

A child gets the path of a file with a JSON list of jobs as its last argument, and prints a line for each, in order:
`{"job": its number, ...}`, with "error" in place of figures for one that failed. Or it prints one line
`{"unavailable": why}` and ends.
"""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
LOST_IN_A_ROW = 3  # After so many jobs that took their process with them, the others are not tried.


class UnavailableError(Exception):
    """What was to be run cannot be run here, and why."""


def run_jobs(
    command: Sequence[str],
    jobs: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, str] | None = None,
    timeout_s: float,
    deadline: float = float("inf"),
) -> Iterator[dict[str, Any]]:
    """What the children say of each job, in order; one process for all of them if none is lost.

    Args:
      command: of the child; the file's path is appended.
      variables: the child's environment; this process's by default.
      timeout_s: for each job, the start of its process included.
      deadline: on `time.monotonic`; jobs that are not done by then are given up, and "skipped" says so.

    Raises:
      UnavailableError: the child says so.
    """
    done = lost = 0
    while done < len(jobs):
        if time.monotonic() >= deadline:
            yield from ({"skipped": "the time was up"} for _ in jobs[done:])
            return
        if lost == LOST_IN_A_ROW:
            yield from ({"error": f"not begun: {lost} jobs in a row ended their process"} for _ in jobs[done:])
            return
        for answer in _run_child(command, jobs[done:], variables, timeout_s, deadline):
            lost = lost + 1 if answer.pop("lost", False) else 0
            done += 1
            yield answer


def serve(run: Callable[[dict[str, Any]], dict[str, Any]], jobs_file: str) -> None:
    """The child's side: runs each job of the file and prints its line."""
    for number, job in enumerate(json.loads(Path(jobs_file).read_text())):
        try:
            answer = run(job)
        except Exception as error:  # Whatever a job raises is its result.
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"job": number, **answer}), flush=True)


def _run_child(
    command: Sequence[str],
    jobs: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str] | None,
    timeout_s: float,
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """Answers up to the first job that is lost, which is the last."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        jobs_file = Path(folder) / "jobs.json"
        jobs_file.write_text(json.dumps(list(jobs)))
        child = subprocess.Popen(
            [*command, str(jobs_file)],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None
        lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        try:
            for _ in jobs:
                left_s = max(0.0, deadline - time.monotonic())
                try:
                    answer = lines.get(timeout=min(timeout_s, left_s))
                except queue.Empty:
                    is_late = left_s < timeout_s
                    why = {"skipped": "the time was up"} if is_late else {"error": f"no answer in {timeout_s:g} s"}
                    yield {**why, "lost": True}
                    return
                if answer is None:
                    yield {"error": f"the process ended ({child.wait()}): {_tail(errors)}", "lost": True}
                    return
                if "unavailable" in answer:
                    raise UnavailableError(answer["unavailable"])
                yield {key: value for key, value in answer.items() if key != "job"}
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            reader.join()
            child.stdout.close()


def _read(output: IO[str], lines: "queue.Queue[dict[str, Any] | None]") -> None:
    for line in output:
        if line.startswith(('{"job"', '{"unavailable"')):
            lines.put(json.loads(line))
    lines.put(None)


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return " | ".join(line.strip() for line in errors.read()[-2000:].splitlines()[-4:])
