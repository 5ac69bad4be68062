"""The last file descriptors of a process, which are kept for load balancers' probes."""

import asyncio
import logging
import resource
import sys
import time
from collections.abc import Callable

logger = logging.getLogger("jaxllm.server")

PROBES = ("/health", "/ready", "/metrics")
LIFE_S = 2.0  # of a connection in which nothing is asked
_SIZE = 64
_LOG_EVERY_S = 10.0


class DescriptorReserve:
    """Tells which connections have come when descriptors are short. Such a one may ask for `PROBES` and is closed after
    the answer; when there are many the oldest is closed, so that a probe always gets in. What else needs a descriptor
    finds one here, too.

    A new connection has the lowest number that is free, so its number tells how many are taken, by whatever.

    on_refusal: called for each connection that was refused for this.
    limit: of descriptors; that of the process, unless a test knows better.
    """

    def __init__(self, on_refusal: Callable[[], None], limit: int | None = None) -> None:
        self._on_refusal = on_refusal
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
        self._limit = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        self._size = min(_SIZE, self._limit // 4)
        self._connections: dict[asyncio.Transport, None] = {}  # the oldest first
        self._num_unlogged = 0
        self._last_line = -_LOG_EVERY_S

    def holds(self, transport: asyncio.Transport) -> bool:
        """Whether this new connection has come when descriptors are short. `forget` it when it is lost."""
        if transport.get_extra_info("socket").fileno() < self._limit - self._size:
            return False
        if len(self._connections) >= self._size // 2:
            oldest = next(iter(self._connections))
            self.forget(oldest)
            self.note()
            oldest.abort()
        self._connections[transport] = None
        return True

    def forget(self, transport: asyncio.Transport) -> None:
        self._connections.pop(transport, None)

    def note(self) -> None:
        """Counts a refused connection, and logs it once in a while."""
        self._on_refusal()
        self._num_unlogged += 1
        now = time.monotonic()
        if now - self._last_line >= _LOG_EVERY_S:
            logger.error(
                "file descriptors are short: %s connections refused; this process may have %s open. Raise the limit "
                "(ulimit -n, LimitNOFILE= in systemd), or send fewer clients",
                f"{self._num_unlogged:,}", f"{self._limit:,}",
            )  # fmt: skip
            self._num_unlogged, self._last_line = 0, now
