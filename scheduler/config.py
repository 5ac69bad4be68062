"""The sizes and the rules of a scheduler."""

from dataclasses import dataclass, fields
from typing import Any, Self

from jaxllm.scheduler.errors import SchedulerConfigError
from jaxllm.scheduler.scheduling_options import SchedulingOptions, TenantConfig, check_integers
from jaxllm.scheduler.windows import num_request_pages

_MINIMUMS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,  # a prompt token and a new one
    "page_size": 1,
    "num_pages": 2,  # the null page and a real one
    "prefix_window": 1,
    "min_chunk_tokens": 1,
    "num_host_pages": 0,
    "max_saving_pages": 1,
    "max_loading_pages": 1,
    "prefetch_window": 0,
}


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulingOptions):
    """The sizes that bound a scheduler, checked against each other at construction, and the rules it follows.

    max_num_seqs: requests that may run at once, which is the number of rows of the `RunningTable`.
    max_num_batched_tokens: the token budget of one step. At least `max_num_seqs`, so that a decoding request
        never has to sit out a step.
    max_model_len: the most tokens one request may have, prompt and output together.
    page_size: tokens in one page of the KV cache.
    num_pages: pages in the KV cache, including page 0, the null page, which only padding points at.
    windows: for each group of layers the size of its sliding window in tokens, or None if it attends to all. Each
        group has a page of its own for the same tokens; all groups draw from one pool.
    prefix_window: among so many equals (of one tenant and priority) at the head of the line, the one with the
        longest cached prefix goes first. None of them is overtaken more than so many times. 1 is off.
    min_chunk_tokens: the smallest chunk that `tpot_target_ms` may shrink to, so that each prompt gets on.
    num_host_pages: pages of the host's memory, where content goes whose page of the device is handed out again, and
        from where it comes back when a request needs it. 0 is off.
    max_saving_pages, max_loading_pages: pages on their way to the host, and back, at once. Content beyond the
        former is lost; a request beyond the latter waits, unless nothing else is on its way.
    prefetch_window: the pages of so many requests at the head of the line are brought back while all rows are taken.
    step_sizes: the padded numbers of tokens of a step (mixed steps), for the estimate of its time; may be empty.
        See `Scheduler.set_step_sizes`.

    The others are those of `SchedulingOptions`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    windows: tuple[int | None, ...] = (None,)
    prefix_window: int = 1
    min_chunk_tokens: int = 4
    num_host_pages: int = 0
    max_saving_pages: int = 256
    max_loading_pages: int = 256
    prefetch_window: int = 4
    step_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, options: SchedulingOptions, **sizes: Any) -> Self:
        """A scheduler's of these sizes that follows these options."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(SchedulingOptions)}, **sizes)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, _MINIMUMS)
        self.check_step_sizes(self.max_num_seqs, self.max_num_batched_tokens)
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise SchedulerConfigError(
                f"windows is {self.windows}; it must have an entry for each group of layers: a window of at least "
                "1 token, or None for a group that attends to all"
            )
        if self.num_host_pages and not self.enable_prefix_caching:
            raise SchedulerConfigError(
                f"num_host_pages is {self.num_host_pages:,} and enable_prefix_caching is False: pages on the host are "
                "found by the prefix cache. Enable prefix caching, or leave num_host_pages at 0."
            )
        if self.prefix_window > 1 and not self.enable_prefix_caching:
            raise SchedulerConfigError(
                f"prefix_window is {self.prefix_window} and enable_prefix_caching is False: there is nothing to find. "
                "Leave prefix_window at 1, or enable prefix caching."
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
