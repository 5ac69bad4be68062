"""The requests without a row, in order."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from jaxllm.scheduler.policy import Policy
from jaxllm.scheduler.request import Request, RequestStatus

_arrival = attrgetter("arrival")


class WaitingQueue:
    """Requests that wait. A preempted one goes back to where its arrival puts it.

    There is a line, by arrival, for each tenant and priority, of which the policy picks one when asked.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[tuple[str, int], list[Request]] = {}
        self._num_lines: Counter[int] = Counter()  # by priority
        self.num_requests = 0
        self.num_preempted = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_requests

    def __iter__(self) -> Iterator[Request]:
        return iter([request for line in self._lines.values() for request in line])

    def first(self, may_run: Callable[[str], bool] | None = None) -> Request | None:
        """The next to run, among the tenants for which `may_run` is true. None if there is none."""
        if may_run is None and len(self._lines) == 1:
            (line,) = self._lines.values()
            return line[0]
        if may_run is None:
            heads = [line[0] for line in self._lines.values()]
        else:
            heads = [line[0] for (tenant, _), line in self._lines.items() if may_run(tenant)]
        if len(heads) <= 1:
            return heads[0] if heads else None
        return min(heads, key=self._policy.rank)

    def has_below(self, priority: int) -> bool:
        """Whether a request of a lower priority number waits. Costs nothing that grows with the lines."""
        return any(own < priority for own in self._num_lines)

    def best_of_equals(self, first: Request, window: int, value: Callable[[Request], int]) -> Request:
        """Of `first` and those behind it in its line, `window` in all, the one of the highest value. A request that
        others have overtaken `window` times is overtaken by nobody."""
        equals = self._lines[first.tenant, first.priority][:window]
        last = next((index for index, other in enumerate(equals) if other.num_times_overtaken >= window), window)
        return max(equals[: last + 1], key=value)

    def note_overtaking(self, request: Request) -> None:
        """A request of its line is going to start before those in front of it."""
        for other in self._lines[request.tenant, request.priority]:
            if other is request:
                break
            other.num_times_overtaken += 1

    @property
    def oldest_arrival_time(self) -> float | None:
        """None if nobody waits."""
        return min((line[0].arrival_time for line in self._lines.values()), default=None)

    def push(self, request: Request) -> None:
        key = request.tenant, request.priority
        if (line := self._lines.get(key)) is None:
            line = self._lines[key] = []
            self._num_lines[request.priority] += 1
        if line and _arrival(line[-1]) > _arrival(request):
            insort(line, request, key=_arrival)
        else:
            line.append(request)
        self.num_requests += 1
        self.num_preempted += request.status is RequestStatus.PREEMPTED
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        key = request.tenant, request.priority
        line = self._lines[key]
        index = 0 if line[0] is request else bisect_left(line, _arrival(request), key=_arrival)
        assert line[index] is request
        del line[index]
        if not line:
            del self._lines[key]
            self._num_lines[request.priority] -= 1
            if not self._num_lines[request.priority]:
                del self._num_lines[request.priority]
        self.num_requests -= 1
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
        self.num_tokens -= request.num_tokens

    def append_tokens(self, request: Request, token_ids: list[int]) -> None:
        """Tokens that were sampled before the request was preempted."""
        request.append_tokens(token_ids)
        self.num_tokens += len(token_ids)

    def check_integrity(self) -> None:
        """Asserts that lines and counters agree. For tests."""
        requests = list(self)
        assert self.num_requests == len(requests)
        assert self.num_preempted == sum(request.status is RequestStatus.PREEMPTED for request in requests)
        assert self.num_tokens == sum(request.num_tokens for request in requests)
        assert self._num_lines == Counter(priority for _, priority in self._lines)
        for (tenant, priority), line in self._lines.items():
            assert line == sorted(line, key=_arrival)
            assert {(request.tenant, request.priority) for request in line} == {(tenant, priority)}
