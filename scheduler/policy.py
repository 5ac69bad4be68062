"""Who goes first. One order decides both whom to admit next and whom to preempt."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from jaxllm.scheduler.request import Request


def urgency(request: Request) -> tuple[int, float, int]:
    """The smaller, the more urgent: by priority, then by arrival. No two requests are equal."""
    return request.priority, request.arrival_time, request.arrival_number


def least_urgent(requests: Iterable[Request]) -> Request:
    """The one to preempt: of the lowest priority, the youngest."""
    return max(requests, key=urgency)


class WaitingQueue:
    """Requests that wait, the most urgent first. A preempted one goes back to where its arrival puts it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # sorted by urgency

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=urgency)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, urgency(request), key=urgency)
        assert self._requests[index] is request
        del self._requests[index]
