"""How many tokens were taken in the last minute."""

from math import floor

_MINUTE_S = 60


class TokenWindow:
    """Counts tokens by the second in which they were taken, so that it costs the same whatever their number.

    A second counts until all of it is a minute ago: no 60 s have more than what the counts were kept within.
    """

    def __init__(self) -> None:
        self._by_second: dict[int, int] = {}  # the oldest first
        self.num_tokens = 0

    def advance(self, now: float) -> None:
        """Forgets what was taken more than a minute ago."""
        while self._by_second and (oldest := next(iter(self._by_second))) < floor(now) - _MINUTE_S:
            self.num_tokens -= self._by_second.pop(oldest)

    def take(self, num_tokens: int, now: float) -> None:
        second = floor(now)
        self._by_second[second] = self._by_second.get(second, 0) + num_tokens
        self.num_tokens += num_tokens

    def give_back(self, num_tokens: int, taken_at: float) -> None:
        """Some of what was taken at that time, unless it does not count any more."""
        if (second := floor(taken_at)) in self._by_second:
            self._by_second[second] -= num_tokens
            self.num_tokens -= num_tokens

    def seconds_until(self, at_most: int, now: float) -> float:
        """How long until no more than so many tokens count, if none are taken."""
        num_left, wait_s = self.num_tokens, 0.0
        for second, number in self._by_second.items():
            if num_left <= at_most:
                break
            num_left -= number
            wait_s = second + _MINUTE_S + 1 - now
        return wait_s
