"""What the scheduler refuses. Both are ValueErrors; the messages name the value, the limit and the way out.

SchedulerConfigError     sizes that contradict each other
RequestRefusedError      a request that can never be served as it stands
"""


class SchedulerConfigError(ValueError):
    """Sizes that contradict each other."""


class RequestRefusedError(ValueError):
    """A request that can never be served as it stands, however long it waits."""
