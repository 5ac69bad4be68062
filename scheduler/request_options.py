"""What a request may ask for beside its tokens. Each option is declared here, and only here."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jaxllm.scheduler.errors import RequestRefusedError

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How a request is to be served. It travels as one value from whoever says it to the scheduler.

    priority: lower runs first.
    tenant: on whose account it runs.
    cache_salt: it shares cached prefixes with requests of the same salt only.
    timeout_s, queue_timeout_s: it ends (with the reason "timeout") when it has not finished, or not started, so long
        after its arrival; None: never.

    Raises RequestRefusedError: priority or a time is out of range, or a value is of a wrong type.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, Integral) or isinstance(self.priority, bool):
            raise _refused("priority", self.priority, "an integer")
        object.__setattr__(self, "priority", int(self.priority))
        if not -_MAX_INT32 <= self.priority <= _MAX_INT32:
            raise RequestRefusedError(
                f"priority is {self.priority:,}; it must be from {-_MAX_INT32:,} to {_MAX_INT32:,}", param="priority"
            )
        for name in ("tenant", "cache_salt"):
            if not isinstance(value := getattr(self, name), str):
                raise _refused(name, value, "a text")
        for name in ("timeout_s", "queue_timeout_s"):
            if (value := getattr(self, name)) is not None:
                if not isinstance(value, Real) or isinstance(value, bool) or not value >= 0:  # not so for NaN
                    raise _refused(name, value, "a number of seconds, 0 or more, or None for no limit")
                object.__setattr__(self, name, float(value))


def _refused(name: str, value: Any, limit: str) -> RequestRefusedError:
    return RequestRefusedError(f"{name} is {value!r}; it must be {limit}", param=name)
