"""Whether the engine makes progress."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm import AsyncLLM


class Watchdog:
    """Judges an engine by what it does, not by what it says of itself: it must be heard of, and when it has requests
    that run, steps must be done.

    limit_s: how long nothing may happen.
    clock: seconds, for tests.
    """

    def __init__(self, llm: "AsyncLLM", limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._llm = llm
        self._limit_s = limit_s
        self._clock = clock
        self._num_steps = -1
        self._last_progress = clock()

    def look(self) -> None:
        """Takes notice of progress. To be called every second or so, for what it has not seen it does not know."""
        stats, now = self._llm.stats, self._clock()
        if stats.num_steps != self._num_steps or not stats.scheduler.num_running:
            self._num_steps = stats.num_steps
            self._last_progress = now

    def problem(self) -> str | None:
        """Why requests would not be served now; None when they would be."""
        self.look()
        llm = self._llm
        if llm.state != "ready":
            return f"the engine is {llm.state}"
        if llm.heartbeat_age_s > self._limit_s:
            return f"the engine was last heard of {llm.heartbeat_age_s:,.1f} s ago; watchdog_s is {self._limit_s:g}"
        if (stalled_s := self._clock() - self._last_progress) > self._limit_s:
            return f"requests run, and no step was done for {stalled_s:,.1f} s; watchdog_s is {self._limit_s:g}"
        return None
