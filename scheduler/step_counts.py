"""What the steps have come to since the start."""

from dataclasses import replace

from jaxllm.scheduler.stats import StepTokens
from jaxllm.scheduler.step_plan import StepPlan


class StepCounts:
    """Figures of `SchedulerStats`, under the same names. Counting a step of decodes costs next to nothing."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._last_plan: StepPlan | None = None
        self._mixed_steps = StepTokens()
        self._num_other_tokens = 0  # of the steps of decodes only
        self._steps_by_size = [0] * ((max_num_batched_tokens - 1).bit_length() + 1)
        self._stalled_since: float | None = None
        self.num_stalls = 0
        self.stall_s = 0.0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    @property
    def last_step(self) -> StepTokens:
        if self._last_plan is None:
            return StepTokens()
        return StepTokens.of(self._last_plan, self._max_num_batched_tokens)

    @property
    def all_steps(self) -> StepTokens:
        num_decode_tokens = self._mixed_steps.num_decode_tokens + self._num_other_tokens
        num_budget_tokens = sum(self._steps_by_size) * self._max_num_batched_tokens
        return replace(self._mixed_steps, num_decode_tokens=num_decode_tokens, num_budget_tokens=num_budget_tokens)

    @property
    def steps_by_size(self) -> tuple[int, ...]:
        return tuple(self._steps_by_size)

    def add(self, plan: StepPlan, *, is_mixed: bool) -> None:
        """is_mixed: whether it may have rows of several tokens."""
        self._last_plan = plan
        self._steps_by_size[(plan.num_tokens - 1).bit_length()] += 1
        if is_mixed:
            self._mixed_steps += StepTokens.of(plan, self._max_num_batched_tokens)
        else:
            self._num_other_tokens += plan.num_tokens

    def note_stall(self, is_stalled: bool, now: float) -> None:
        """Once a step: whether the device has nothing to do because pages are on their way from the host."""
        if self._stalled_since is not None:
            self.stall_s += now - self._stalled_since
        elif is_stalled:
            self.num_stalls += 1
        self._stalled_since = now if is_stalled else None

    def forget_stall(self) -> None:
        """Nobody waits for pages any more."""
        self._stalled_since = None
