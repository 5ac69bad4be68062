"""What an operator sees of an engine."""

from dataclasses import dataclass, field

from jaxllm.scheduler import SchedulerStats


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot. What is not said to hold now counts since the engine's start.

    time: when it was taken (``time.monotonic``).
    num_steps: steps whose results have been taken in.
    host_s, device_wait_s: parts of the steps' time: what the host did, and how long it waited for the device. Their
        sum is the time that the engine was not idle.
    num_compilations_after_start: programs compiled because of requests. Anything but 0 is a bug.
    num_output_tokens: tokens that requests were given.
    num_unsound: requests that ended because their logits were NaN or infinite.
    num_padded_tokens: tokens that steps were padded with, to fill their buckets.
    memory_bytes, memory_limit_bytes: of the first device, in use now and in all; None where JAX does not know (CPU).
    scheduler: of its requests, pages and steps.
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
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
