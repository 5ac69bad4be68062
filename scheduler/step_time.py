"""How long a step takes, learned from those that ran."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import sqrt

import numpy as np

_FORGETTING = 0.99  # the weight of the past at each new step: about the last hundred of each kind count
_MIN_STEPS = 4
_MOST_UNREAD = 16  # steps that are taken in together


class StepTimeModel:
    """seconds ≈ a + b · padded tokens + c · KV tokens read + d · pairs, by least squares over the recent steps.

    Pairs of a query and a key are what the attention of chunks costs: a chunk of n tokens, with `depth` before it, has
    n · (depth + n / 2). The rows of one token are told apart by what reading their keys and values costs.

    Steps with prompts and steps of decodes are forgotten each by those of its own kind: what a prompt costs is still
    known after an hour without one.

    sizes: the padded numbers of tokens of steps with prompts, of which the last fits any step; without any, tokens are
        not padded.
    """

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.set_sizes(sizes)
        self._moments = np.zeros((2, 4, 4))  # of the decodes' steps, and of those with prompts
        self._products = np.zeros((2, 4))
        self._coefficients = np.zeros(4)
        self._unread: list[tuple[float, int, int, float, float, bool]] = []
        self._num_steps = 0

    def set_sizes(self, sizes: Iterable[int]) -> None:
        """The sizes from here on."""
        self._sizes = sorted(sizes)

    def padded(self, num_tokens: int) -> int:
        """The size that a step of so many tokens is padded to, if it has prompts."""
        return padded(num_tokens, self._sizes)

    def observe(
        self, num_tokens: int, num_kv_tokens: int, seconds: float, *, num_pairs: float = 0.0, has_prompts: bool
    ) -> None:
        """A step has taken so long. num_kv_tokens: of its rows of one token. num_pairs: of its other rows."""
        num_tokens = self.padded(num_tokens) if has_prompts else num_tokens
        self._unread.append((1.0, num_tokens, num_kv_tokens, num_pairs, seconds, has_prompts))
        self._num_steps += 1
        if len(self._unread) >= min(_MOST_UNREAD, max(_MIN_STEPS, self._num_steps // 4)):
            self._fitted()

    def predict(self, num_tokens: int, num_kv_tokens: int, num_pairs: float = 0.0) -> float | None:
        """Seconds of a step with prompts; None before a few steps have run."""
        if self._num_steps < _MIN_STEPS:
            return None
        return float(np.array([1.0, self.padded(num_tokens), num_kv_tokens, num_pairs]) @ self._fitted())

    def seconds_of_tokens(self, num_tokens: int) -> float | None:
        """What so many tokens at the beginning of a prompt add to the time of their steps; None before a few steps
        have run."""
        if self._num_steps < _MIN_STEPS:
            return None
        _, per_token, _, per_pair = self._fitted().tolist()
        return per_token * num_tokens + per_pair * num_tokens**2 / 2

    def seconds_of_padding(self, num_tokens: int) -> float:
        """What so many tokens of padding add to the time of a step."""
        return float(self._fitted()[1]) * num_tokens

    def most_prompt_tokens(
        self, seconds: float, num_other_tokens: int, num_kv_tokens: int, depth: int, at_most: int
    ) -> int:
        """The most tokens of a prompt, with `depth` before them, that a step may read beside `num_other_tokens` without
        taking longer than `seconds`; `at_most` before a few steps have run."""
        if self._num_steps < _MIN_STEPS:
            return at_most
        fixed, per_token, per_kv_token, per_pair = self._fitted().tolist()
        rest = seconds - fixed - per_kv_token * num_kv_tokens
        if not self._sizes:
            rest -= per_token * num_other_tokens
            return _most(rest, per_token + per_pair * depth, per_pair / 2, at_most)
        most = 0
        for size in self._sizes:
            room = min(size - num_other_tokens, at_most)
            if room > most:
                most = max(most, _most(rest - per_token * size, per_pair * depth, per_pair / 2, room))
        return most

    def _fitted(self) -> np.ndarray:
        """(a, b, c, d), none below 0: a coefficient that comes out negative is left out and the others fitted again."""
        if self._unread:
            self._take_in()
            moments, products = self._moments.sum(axis=0), self._products.sum(axis=0)
            scale = 1.0 / np.sqrt(moments.diagonal().clip(1e-12))
            scaled = moments * np.outer(scale, scale) + 1e-6 * np.eye(4)
            active = [0, 1, 2, 3]
            while True:
                solution = np.linalg.solve(scaled[np.ix_(active, active)], (scale * products)[active])
                if (solution >= 0.0).all() or len(active) == 1:
                    break
                del active[int(np.argmin(solution))]
            self._coefficients = np.zeros(4)
            self._coefficients[active] = scale[active] * solution.clip(0.0)
        return self._coefficients

    def _take_in(self) -> None:
        """Adds the steps that have not been looked at to the sums of their kind."""
        unread = np.array(self._unread)
        features, seconds, has_prompts = unread[:, :4], unread[:, 4], unread[:, 5] > 0
        if self._num_steps - len(unread) >= _MIN_STEPS:  # A pause of the host is not the step's.
            seconds = np.minimum(seconds, 3.0 * (features @ self._coefficients))
        self._unread = []
        for kind in (0, 1):
            own = features[has_prompts == kind]
            weights = _FORGETTING ** np.arange(len(own) - 1, -1, -1)
            weighted = own * weights[:, None]
            self._moments[kind] = _FORGETTING ** len(own) * self._moments[kind] + weighted.T @ own
            self._products[kind] = (
                _FORGETTING ** len(own) * self._products[kind] + weighted.T @ seconds[has_prompts == kind]
            )


def padded(num_tokens: int, sizes: Sequence[int]) -> int:
    """The least of `sizes`, which are in order, that holds so many tokens; their number if none does."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else num_tokens


def _most(seconds: float, per_token: float, per_square: float, at_most: int) -> int:
    """The most tokens x, at most `at_most`, of which per_token · x + per_square · x² is within `seconds`."""
    if seconds < 0:
        return 0
    if per_token * at_most + per_square * at_most**2 <= seconds:
        return at_most
    return int(2 * seconds / (per_token + sqrt(per_token**2 + 4 * per_square * seconds)))
