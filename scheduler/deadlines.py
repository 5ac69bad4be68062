"""Whose time is over."""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from jaxllm.scheduler.request import Request

_Entry = tuple[float, int, str, bool]  # when, whose (number and id), and whether only if it has not started
_MIN_ENTRIES = 64


class Deadlines:
    """Wakes once for each deadline of the unfinished `requests`, which it knows by number."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        if len(self._heap) > _MIN_ENTRIES + 4 * len(self._requests):  # most are of requests that have finished
            self._heap = [entry for entry in self._heap if self._request_of(entry) is not None]
            heapify(self._heap)
        for when, is_for_queue in ((request.deadline, False), (request.queue_deadline, True)):
            if when is not None:
                heappush(self._heap, (when, request.arrival_number, request.request_id, is_for_queue))

    def passed(self, now: float) -> Iterator[Request]:
        """Those whose time is over. The caller ends each before it asks for the next."""
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            request = self._request_of(entry)
            if request is not None and not (entry[3] and request.has_started):
                yield request

    def _request_of(self, entry: _Entry) -> Request | None:
        """None if it has finished."""
        _, number, request_id, _ = entry
        request = self._requests.get(request_id)
        return None if request is None or request.arrival_number != number else request
