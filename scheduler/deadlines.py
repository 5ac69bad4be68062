"""Whose time is over."""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from jaxllm.scheduler.request import Request, RequestStatus

_QUEUED = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_INPUT)


class Deadlines:
    """Wakes for each deadline once. Holds no request back from being forgotten: it knows them by number."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, bool]] = []  # when, whose, and whether only if it has not started

    def add(self, request: Request) -> None:
        for when, is_for_queue in ((request.deadline, False), (request.queue_deadline, True)):
            if when is not None:
                heappush(self._heap, (when, request.arrival_number, request.request_id, is_for_queue))

    def passed(self, requests: Mapping[str, Request], now: float) -> Iterator[Request]:
        """Those of the unfinished `requests` whose time is over. The caller ends each before it asks for the next."""
        while self._heap and self._heap[0][0] <= now:
            _, number, request_id, is_for_queue = heappop(self._heap)
            request = requests.get(request_id)
            if request is None or request.arrival_number != number:
                continue
            if not is_for_queue or request.status in _QUEUED:
                yield request
