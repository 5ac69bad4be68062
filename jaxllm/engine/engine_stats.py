"""What an operator sees of an engine."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot, in plain numbers. What is not said to hold now counts since the engine's start.

    time: when it was taken (``time.monotonic``).
    num_steps: steps whose results have been taken in.
    host_s, device_wait_s: parts of the steps' time: what the host did, and how long it waited for the device. Their
        sum is the time that the engine was not idle.
    num_compilations_after_start: programs compiled because of requests. Anything but 0 is a bug.
    num_output_tokens: tokens that requests were given.
    num_unsound: requests that ended because their logits were NaN or infinite.
    num_padded_tokens: tokens that steps were padded with, to fill their buckets.
    memory_bytes, memory_limit_bytes: of the first device, in use now and in all; None where JAX does not know (CPU).
    num_requests: by status, as `RequestStatus` spells them ("waiting", "decoding", "finished_stop" …), an entry for
        each. Those of finished_* count since the start, the others now.
    last_step, all_steps: tokens by kind, under the names of the scheduler's `StepTokens`.

    The others are those of the scheduler's `SchedulerStats`.
    """

    time: float
    num_steps: int = 0
    host_s: float = 0.0
    device_wait_s: float = 0.0
    num_compilations_after_start: int = 0
    num_output_tokens: int = 0
    num_unsound: int = 0
    num_padded_tokens: int = 0
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    num_requests: dict[str, int] = field(default_factory=dict)
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
    last_step: dict[str, int] = field(default_factory=dict)
    all_steps: dict[str, int] = field(default_factory=dict)
    steps_by_size: tuple[int, ...] = ()

    @property
    def num_running(self) -> int:
        return self._count("prefilling", "decoding")

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: new ones, those that wait for input or pages, and preempted ones."""
        return self._count("waiting_for_input", "waiting", "waiting_for_pages", "preempted")

    def _count(self, *statuses: str) -> int:
        return sum(self.num_requests.get(status, 0) for status in statuses)
