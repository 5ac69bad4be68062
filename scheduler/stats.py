"""What an operator sees of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxllm.scheduler.request import RequestStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """A snapshot.

    num_requests: by status, an entry for each. Those of FINISHED_* count since the start, the others now.
    num_free_pages, num_used_pages: of the KV cache, without the null page.
    num_preemptions: since the start.
    num_recomputed_tokens: tokens whose keys and values were given up by preemptions, since the start.
    """

    num_requests: Mapping[RequestStatus, int]
    num_free_pages: int
    num_used_pages: int
    num_preemptions: int
    num_recomputed_tokens: int
