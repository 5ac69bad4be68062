"""When requests may start, and how much of a prompt a step may read."""

from collections.abc import Iterable

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.scheduler.step_time import StepTimeModel, padded
from jaxllm.scheduler.waiting_queue import WaitingQueue

_NEXT_TO_NOTHING = 1.02


class Pacing:
    """The merge window, and the targets for TTFT and TPOT. Times are in seconds of the scheduler's clock."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._all_sizes = sorted(config.step_sizes)
        self._step_time = StepTimeModel(config.step_sizes)
        self._last_result_time = self._sizes_time = float("-inf")

    def set_step_sizes(self, sizes: Iterable[int], now: float) -> None:
        """See `Scheduler.set_step_sizes`. What was planned before ran in other sizes, and nothing is learned of it."""
        self._step_time.set_sizes(sizes)
        self._sizes_time = now

    def window_s(self, waiting: WaitingQueue, now: float) -> float:
        """How long requests that wait are still to wait for others to start with; 0 if they may start."""
        config = self._config
        if config.max_wait_ms == 0 or not waiting or len(waiting) >= config.min_batch:
            return 0.0
        oldest = waiting.oldest_arrival_time
        assert oldest is not None
        return max(0.0, oldest + config.max_wait_ms / 1e3 - now)

    def most_prompt_tokens(
        self, budget: int, num_other_tokens: int, num_kv_tokens: int, reading: Request | None, depth: int, now: float
    ) -> int:
        """Of `budget`, the tokens of prompts that a step may read beside `num_other_tokens` of running requests.

        num_kv_tokens: whose keys and values the others read.
        reading: whose prompt is next, and depth: how much of it is computed.
        """
        config, step_time = self._config, self._step_time
        if config.tpot_target_ms is None or not num_other_tokens:
            return budget
        ttft_target_s = float("inf") if config.ttft_target_ms is None else config.ttft_target_ms / 1e3
        if reading is not None and reading.num_output_tokens == 0 and now - reading.arrival_time > ttft_target_s:
            return budget
        beside = (num_other_tokens, num_kv_tokens, depth)
        most = step_time.most_prompt_tokens(config.tpot_target_ms / 1e3, *beside, at_most=budget)
        least = min(config.min_chunk_tokens, budget)
        if most >= least:
            return most
        # The least chunk is read in any case, and the rest of its padding if that costs next to nothing. While a
        # smaller program is not there yet, it may cost as much as the padding, so that few steps are slow.
        least_s = step_time.predict(num_other_tokens + least, num_kv_tokens, least * (depth + least / 2)) or 0.0
        size = step_time.padded(num_other_tokens + least)
        num_lost = size - padded(num_other_tokens + least, self._all_sizes)
        most_s = _NEXT_TO_NOTHING * least_s + step_time.seconds_of_padding(num_lost)
        at_most = min(budget, size - num_other_tokens)
        return max(least, step_time.most_prompt_tokens(most_s, *beside, at_most=at_most))

    def seconds_to_compute(self, num_tokens: int) -> float | None:
        """What so many tokens of a prompt take beyond what the steps that they run in take anyway; None before a few
        steps have run."""
        return self._step_time.seconds_of_tokens(num_tokens)

    def note_result(self, plan: StepPlan, now: float) -> None:
        """The result of a plan has come. The step began when it was planned, or when the one before it ended."""
        if self._config.tpot_target_ms is None and not self._config.num_host_pages:
            return
        seconds, self._last_result_time = now - max(plan.time, self._last_result_time), now
        if plan.time <= self._sizes_time:
            return
        self._step_time.observe(
            plan.num_tokens,
            plan.num_decode_kv_tokens,
            seconds,
            num_pairs=plan.num_chunk_pairs,
            has_prompts=not plan.is_decode_only,
        )
