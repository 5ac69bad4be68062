"""Counting the programs that JAX compiles because of requests, of which there must be none."""

import threading
from typing import Any

import jax

from jaxllm.engine.runner import COMPILE_THREADS_PREFIX

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts from its construction on, but not what the runner compiles in its own threads: that is its start."""

    def __init__(self) -> None:
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _EVENT and not threading.current_thread().name.startswith(COMPILE_THREADS_PREFIX):
            self.number += 1

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
