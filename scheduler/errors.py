"""What the scheduler refuses. The messages name the value, the limit and the way out.

SchedulerConfigError (ValueError)    sizes that contradict each other
RequestRefusedError (ValueError)     a request that can never be served as it stands
SchedulerBusyError                   a request for which there is no room now; it may be sent again
"""


class SchedulerConfigError(ValueError):
    """Sizes that contradict each other."""


class RequestRefusedError(ValueError):
    """A request that can never be served as it stands, however long it waits.

    param: the argument of `Request` that is to blame; "prompt" for its tokens.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SchedulerBusyError(Exception):
    """A request that a full queue or a tenant's quota keeps out for now.

    retry_after_s: when to try again; None where that depends on others.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
