"""How long a step takes, learned from those that ran."""

from bisect import bisect_left, bisect_right

import numpy as np

_FORGETTING = 0.98  # the weight of the past at each new step: about the last fifty count
_MIN_STEPS = 4


class StepTimeModel:
    """seconds ≈ a + b · padded tokens + c · KV tokens read, by least squares over the recent steps.

    sizes: the padded numbers of tokens of steps with prompts; without any, tokens are not padded.
    """

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self._sizes = sorted(sizes)
        self._moments = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._coefficients: np.ndarray | None = None
        self._num_steps = 0

    def padded(self, num_tokens: int) -> int:
        """The size that a step of so many tokens is padded to."""
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else num_tokens

    def observe(self, num_tokens: int, num_kv_tokens: int, seconds: float, *, is_padded: bool) -> None:
        """A step has taken so long."""
        features = np.array([1.0, self.padded(num_tokens) if is_padded else num_tokens, num_kv_tokens])
        if self._num_steps >= _MIN_STEPS:
            seconds = min(seconds, 3.0 * float(features @ self._fitted()))  # a pause of the host is not the step's
        self._moments = _FORGETTING * self._moments + np.outer(features, features)
        self._products = _FORGETTING * self._products + seconds * features
        self._coefficients = None
        self._num_steps += 1

    def predict(self, num_tokens: int, num_kv_tokens: int) -> float | None:
        """Seconds of a step with prompts; None before a few steps have run."""
        if self._num_steps < _MIN_STEPS:
            return None
        return float(np.array([1.0, self.padded(num_tokens), num_kv_tokens]) @ self._fitted())

    def seconds_of_tokens(self, num_tokens: int) -> float | None:
        """The part of a step's time that so many tokens are the cause of; None before a few steps have run."""
        return None if self._num_steps < _MIN_STEPS else num_tokens * self._fitted().item(1)

    def most_tokens(self, seconds: float, num_kv_tokens: int, at_most: int) -> int:
        """The most tokens of a step that should take no longer than `seconds`; `at_most` before a few have run."""
        if self._num_steps < _MIN_STEPS:
            return at_most
        fixed, per_token, per_kv_token = self._fitted().tolist()
        left = seconds - fixed - per_kv_token * num_kv_tokens
        if left <= 0:
            return 0
        if per_token * self.padded(at_most) <= left:
            return at_most
        most = int(left / per_token)
        index = bisect_right(self._sizes, most)
        return self._sizes[index - 1] if index else 0 if self._sizes else most

    def _fitted(self) -> np.ndarray:
        """(a, b, c), none below 0: a coefficient that comes out negative is left out and the others fitted again."""
        if self._coefficients is None:
            active = [0, 1, 2]
            while True:
                moments, products = self._moments[np.ix_(active, active)], self._products[active]
                scale = 1.0 / np.sqrt(moments.diagonal().clip(1e-12))
                scaled = moments * np.outer(scale, scale) + 1e-6 * np.eye(len(active))
                solution = scale * np.linalg.solve(scaled, scale * products)
                if (solution >= 0.0).all() or len(active) == 1:
                    break
                del active[int(np.argmin(solution))]
            self._coefficients = np.zeros(3)
            self._coefficients[active] = solution.clip(0.0)
        return self._coefficients
