"""The sizes that bound a scheduler."""

from dataclasses import dataclass, fields

from jaxllm.scheduler.errors import SchedulerConfigError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The sizes that bound a scheduler, checked against each other at construction.

    max_num_seqs: requests that may run at once, which is the number of rows of the `RunningTable`.
    max_num_batched_tokens: the token budget of one step. At least `max_num_seqs`, so that a decoding request
        never has to sit out a step.
    max_model_len: the most tokens one request may have, prompt and output together.
    page_size: tokens in one page of the KV cache.
    num_pages: pages in the KV cache, including page 0, the null page, which only padding points at.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int

    def __post_init__(self) -> None:
        minimums = {
            "max_model_len": 2,
            "num_pages": 2,
        }  # a prompt token and a new one; the null page and a real one
        for field in fields(self):
            value, minimum = getattr(self, field.name), minimums.get(field.name, 1)
            if value < minimum:
                raise SchedulerConfigError(f"{field.name} is {value:,}; it must be at least {minimum}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SchedulerConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens:,} and max_num_seqs is "
                f"{self.max_num_seqs:,}: a step must have room for one token of each running request. "
                "Raise the first or lower the second."
            )

    @property
    def max_pages_per_seq(self) -> int:
        """P: pages of a request that has max_model_len tokens."""
        return self.num_pages_for(self.max_model_len)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
