"""What an operator sees of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxllm.scheduler.request import RequestStatus
from jaxllm.scheduler.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Tokens of one step, or of all steps since the start.

    num_decode_tokens: of rows that had one token to compute.
    num_prefill_tokens: of prompts, and of what preempted requests compute again.
    num_draft_tokens: to be verified.
    num_budget_tokens: what the steps could have computed: max_num_batched_tokens each.
    """

    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_draft_tokens: int = 0
    num_budget_tokens: int = 0

    @classmethod
    def of(cls, plan: StepPlan, max_num_batched_tokens: int) -> "StepTokens":
        num_draft_tokens, num_decode_tokens = 0, plan.num_decodes
        if plan.num_draft_tokens is not None:
            num_draft_tokens = int(plan.num_draft_tokens.sum())
            num_decode_tokens += int(np.count_nonzero(plan.num_draft_tokens))
        return cls(
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=plan.num_tokens - num_decode_tokens - num_draft_tokens,
            num_draft_tokens=num_draft_tokens,
            num_budget_tokens=max_num_batched_tokens,
        )

    def __add__(self, other: "StepTokens") -> "StepTokens":
        return StepTokens(
            num_decode_tokens=self.num_decode_tokens + other.num_decode_tokens,
            num_prefill_tokens=self.num_prefill_tokens + other.num_prefill_tokens,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_budget_tokens=self.num_budget_tokens + other.num_budget_tokens,
        )

    @property
    def budget_use(self) -> float:
        """The part of the budget that was used, from 0 to 1."""
        num_tokens = self.num_decode_tokens + self.num_prefill_tokens + self.num_draft_tokens
        return num_tokens / self.num_budget_tokens if self.num_budget_tokens else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """A snapshot. It costs the same whatever is queued and running.

    num_requests: by status, an entry for each. Those of FINISHED_* count since the start, the others now.
    num_queued_tokens: of the requests that wait.
    queue_age_s: since the arrival of the oldest request that waits; 0 if none does.
    num_free_pages, num_used_pages: of the KV cache, without the null page. Used ones belong to requests that run, or
        that wait for the rest of their pages to come from the host. Each group of layers has its own.
    num_cached_pages: those of the free pages whose content a request may still find.
    num_left_pages: pages that running requests gave back because they had left a sliding window, since the start.
    num_host_pages: of the host's memory that hold content.
    num_saved_pages, num_loaded_pages, num_lost_pages, num_failed_pages: copied to the host and back, given up, and
        those whose copy failed, since the start.
    num_stalls, stall_s: how often and for how long the device had nothing to do because pages were on their way.
    num_preemptions: since the start.
    num_recomputed_tokens: tokens that preempted requests had to compute again, since the start. What they found in
        the prefix cache is not among them.
    num_prefix_query_tokens, num_prefix_hit_tokens: what admitted requests looked for and found in the prefix cache,
        since the start.
    num_accepted_tokens: drafts that were right, since the start.
    last_step, all_steps: tokens by kind.
    steps_by_size: steps since the start; number i counts those of at most 2**i tokens and of more than number i - 1.
    """

    num_requests: Mapping[RequestStatus, int] = field(default_factory=lambda: dict.fromkeys(RequestStatus, 0))
    num_queued_tokens: int = 0
    queue_age_s: float = 0.0
    num_free_pages: int = 0
    num_used_pages: int = 0
    num_cached_pages: int = 0
    num_left_pages: int = 0
    num_host_pages: int = 0
    num_saved_pages: int = 0
    num_loaded_pages: int = 0
    num_lost_pages: int = 0
    num_failed_pages: int = 0
    num_stalls: int = 0
    stall_s: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_accepted_tokens: int = 0
    last_step: StepTokens = StepTokens()
    all_steps: StepTokens = StepTokens()
    steps_by_size: tuple[int, ...] = ()

    @property
    def num_running(self) -> int:
        return sum(self.num_requests.get(status, 0) for status in (RequestStatus.PREFILLING, RequestStatus.DECODING))

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: new ones, those that wait for input or pages, and preempted ones."""
        return sum(number for status, number in self.num_requests.items() if not status.is_finished) - self.num_running
