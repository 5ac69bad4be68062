"""The sizes and the rules of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxllm.scheduler.errors import SchedulerConfigError
from jaxllm.scheduler.windows import num_request_pages

POLICIES = ("priority", "fcfs", "fair")
RETURNS = ("auto", "copy", "recompute")


@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """What one tenant gets. None is no limit.

    weight: its share of the tokens beside other tenants, under the policy "fair".
    max_running: requests that run at once; further ones wait and hold up nobody else.
    max_queued: requests that wait; further ones are refused.
    max_tokens_per_minute: prompt and output of the requests that arrive within any 60 seconds. A request reserves its
        max_tokens when it arrives, and gives back what it did not use when it ends.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    max_tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < float("inf"):
            raise SchedulerConfigError(f"weight is {self.weight}; it must be a number above 0")
        for name in ("max_running", "max_queued", "max_tokens_per_minute"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SchedulerConfigError(f"{name} is {value:,}; it must be at least 1, or None for no limit")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The sizes that bound a scheduler, checked against each other at construction, and the rules it follows.

    max_num_seqs: requests that may run at once, which is the number of rows of the `RunningTable`.
    max_num_batched_tokens: the token budget of one step. At least `max_num_seqs`, so that a decoding request
        never has to sit out a step.
    max_model_len: the most tokens one request may have, prompt and output together.
    page_size: tokens in one page of the KV cache.
    num_pages: pages in the KV cache, including page 0, the null page, which only padding points at.
    windows: for each group of layers the size of its sliding window in tokens, or None if it attends to all. Each
        group has a page of its own for the same tokens; all groups draw from one pool.
    enable_prefix_caching: whether requests share the pages of what their prompts begin with.
    policy: who goes first. "priority": the lower number, then the earlier arrival; a lower number takes room
        from higher ones. "fcfs": by arrival; priorities are refused. "fair": the tenant that has had the fewest
        tokens for its weight, and within a tenant by priority and arrival.
    prefix_window: among so many equals (of one tenant and priority) at the head of the line, the one with the
        longest cached prefix goes first. None of them is overtaken more than so many times. 1 is off.
    tenants: the settings of the tenants that do not get `default_tenant`.
    max_queued_requests, max_queued_tokens: what may wait, in requests and in prompt tokens; None is no limit.
    max_wait_ms, min_batch: a merge window. Requests start when `min_batch` of them wait, or one has waited for
        `max_wait_ms`. 0 starts each at once.
    tpot_target_ms: the chunks of prompts shrink so that a step beside decodes takes no longer than this.
    ttft_target_ms: a prompt that has waited so long for its first token is read at full speed, whatever
        `tpot_target_ms` says.
    min_chunk_tokens: the smallest chunk that `tpot_target_ms` may shrink to, so that each prompt gets on.
    num_host_pages: pages of the host's memory, where content goes whose page of the device is handed out again, and
        from where it comes back when a request needs it. 0 is off.
    return_by: how what lies there comes back: "copy", "recompute" (it stays where it is, which shows what the
        copies are worth), or "auto", what is estimated to take less time.
    max_saving_pages, max_loading_pages: pages on their way to the host, and back, at once. Content beyond the
        former is lost; a request beyond the latter waits, unless nothing else is on its way.
    prefetch_window: the pages of so many requests at the head of the line are brought back while all rows are taken.
    step_sizes: the padded numbers of tokens of a step (mixed steps), for the estimate of its time; may be empty.
        See `Scheduler.set_step_sizes`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    windows: tuple[int | None, ...] = (None,)
    enable_prefix_caching: bool = True
    policy: str = "priority"
    prefix_window: int = 1
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    default_tenant: TenantConfig = TenantConfig()
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_wait_ms: float = 0.0
    min_batch: int = 1
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    min_chunk_tokens: int = 4
    num_host_pages: int = 0
    return_by: str = "auto"
    max_saving_pages: int = 256
    max_loading_pages: int = 256
    prefetch_window: int = 4
    step_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        minimums = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # a prompt token and a new one
            "page_size": 1,
            "num_pages": 2,  # the null page and a real one
            "prefix_window": 1,
            "max_queued_requests": 1,
            "max_queued_tokens": 1,
            "max_wait_ms": 0,
            "min_batch": 1,
            "min_chunk_tokens": 1,
            "num_host_pages": 0,
            "max_saving_pages": 1,
            "max_loading_pages": 1,
            "prefetch_window": 0,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise SchedulerConfigError(f"{name} is {value:,}; it must be at least {minimum}")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise SchedulerConfigError(
                f"windows is {self.windows}; it must have an entry for each group of layers: a window of at least "
                "1 token, or None for a group that attends to all"
            )
        if self.max_wait_ms == float("inf"):
            raise SchedulerConfigError("max_wait_ms is inf; it must be finite, or a request might wait for ever")
        for name in ("tpot_target_ms", "ttft_target_ms"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise SchedulerConfigError(f"{name} is {value:,}; it must be above 0, or None for no target")
        if self.policy not in POLICIES:
            raise SchedulerConfigError(f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        if self.return_by not in RETURNS:
            raise SchedulerConfigError(f"return_by is {self.return_by!r}; it must be one of {', '.join(RETURNS)}")
        if self.num_host_pages and not self.enable_prefix_caching:
            raise SchedulerConfigError(
                f"num_host_pages is {self.num_host_pages:,} and enable_prefix_caching is False: pages on the host are "
                "found by the prefix cache. Enable prefix caching, or leave num_host_pages at 0."
            )
        if self.ttft_target_ms is not None and self.tpot_target_ms is None:
            raise SchedulerConfigError(
                f"ttft_target_ms is {self.ttft_target_ms} and tpot_target_ms is None: prompts are read at full speed "
                "in any case. Set tpot_target_ms, or leave ttft_target_ms at None."
            )
        if self.prefix_window > 1 and not self.enable_prefix_caching:
            raise SchedulerConfigError(
                f"prefix_window is {self.prefix_window} and enable_prefix_caching is False: there is nothing to find. "
                "Leave prefix_window at 1, or enable prefix caching."
            )
        if self.policy != "fair":
            for name, tenant in (("default_tenant", self.default_tenant), *self.tenants.items()):
                if tenant.weight != 1.0:
                    raise SchedulerConfigError(
                        f"the weight of tenant {name!r} is {tenant.weight}, and the policy is {self.policy!r}, which "
                        "knows none. Leave the weight at 1, or set the policy 'fair'."
                    )
        if self.min_batch > 1 and self.max_wait_ms == 0:
            raise SchedulerConfigError(
                f"min_batch is {self.min_batch} and max_wait_ms is 0: no request waits for others. "
                "Raise max_wait_ms, or leave min_batch at 1."
            )
        if self.min_batch > self.max_num_seqs:
            raise SchedulerConfigError(
                f"min_batch is {self.min_batch:,} and max_num_seqs is {self.max_num_seqs:,}: so many never start "
                "at once. Lower the first or raise the second."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SchedulerConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens:,} and max_num_seqs is "
                f"{self.max_num_seqs:,}: a step must have room for one token of each running request. "
                "Raise the first or lower the second."
            )

    @property
    def max_pages_per_seq(self) -> int:
        """P: pages of a group that a request of max_model_len tokens spans."""
        return -(-self.max_model_len // self.page_size)

    @property
    def num_groups(self) -> int:
        """G: groups of layers, each with a page table of its own."""
        return len(self.windows)

    def num_pages_for(self, num_tokens: int, num_shared_pages: int = 0) -> int:
        """The most pages that a request of `num_tokens` tokens holds at once, over all groups, not counting the first
        `num_shared_pages` of each."""
        return num_request_pages(
            num_tokens, self.windows, self.max_num_batched_tokens, self.page_size, num_shared_pages
        )

    def max_total_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """The most tokens, prompt and output, that a request may come to have."""
        return min(num_prompt_tokens + max_tokens, self.max_model_len)

    def tenant(self, name: str) -> TenantConfig:
        return self.tenants.get(name, self.default_tenant)
