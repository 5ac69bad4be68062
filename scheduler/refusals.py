"""What is turned away at the door, with the arithmetic."""

from collections import Counter

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerBusyError
from jaxllm.scheduler.request import Request


def refuse_if_unservable(request: Request, config: SchedulerConfig) -> None:
    """Raises RequestRefusedError if the request could never run to its end."""
    name = f"request {request.request_id!r}"
    num_prompt_tokens, max_tokens = request.num_prompt_tokens, request.max_tokens
    if request.status.is_finished:
        raise RequestRefusedError(f"{name} is {request.status.value}: make a new Request to run it again")
    if num_prompt_tokens == 0:
        raise RequestRefusedError(f"{name}: the prompt is empty; it must have at least one token", param="prompt")
    if max_tokens < 1:
        raise RequestRefusedError(f"{name}: max_tokens is {max_tokens:,}; it must be at least 1", param="max_tokens")
    if num_prompt_tokens >= config.max_model_len:
        raise RequestRefusedError(
            f"{name}: the prompt has {num_prompt_tokens:,} tokens; max_model_len is "
            f"{config.max_model_len:,}, and must hold the prompt and at least one new token. "
            "Shorten the prompt or raise max_model_len.",
            param="prompt",
        )
    num_tokens = config.max_total_tokens(num_prompt_tokens, max_tokens)
    num_pages, num_pool_pages = config.num_pages_for(num_tokens), config.num_pages - 1
    if num_pages > num_pool_pages:
        raise RequestRefusedError(
            f"{name}: {num_prompt_tokens:,} prompt tokens and max_tokens {max_tokens:,}, within "
            f"max_model_len {config.max_model_len:,}, make {num_tokens:,} tokens; they need "
            f"{num_pages:,} pages of {config.page_size:,} tokens{_over_groups(config)}, and the KV cache has "
            f"{num_pool_pages:,}. Lower max_tokens or give the KV cache more pages.",
            param="max_tokens",
        )
    if request.priority and config.scheduling_policy == "fcfs":
        raise RequestRefusedError(
            f"{name}: priority is {request.priority}, and scheduling_policy is 'fcfs', which knows none. "
            "Leave the priority at 0, or set scheduling_policy to 'priority'.",
            param="priority",
        )
    if config.max_queued_tokens is not None and num_prompt_tokens > config.max_queued_tokens:
        raise RequestRefusedError(
            f"{name}: the prompt has {num_prompt_tokens:,} tokens, more than the queue may hold; "
            f"max_queued_tokens is {config.max_queued_tokens:,}. Shorten the prompt or raise max_queued_tokens.",
            param="prompt",
        )


def refuse_if_full(request: Request, config: SchedulerConfig, num_queued: int, num_queued_tokens: int) -> None:
    """Raises SchedulerBusyError if the queue, which holds so many requests and tokens, has no room for another."""
    name = f"request {request.request_id!r}"
    if config.max_queued_requests is not None and num_queued >= config.max_queued_requests:
        raise SchedulerBusyError(
            f"{name}: {num_queued:,} requests are queued; max_queued_requests is {config.max_queued_requests:,}. "
            "Send it again later, or raise max_queued_requests."
        )
    limit = config.max_queued_tokens
    if limit is not None and num_queued_tokens + request.num_prompt_tokens > limit:
        raise SchedulerBusyError(
            f"{name}: its prompt has {request.num_prompt_tokens:,} tokens and {num_queued_tokens:,} are queued; "
            f"max_queued_tokens is {limit:,}. Send it again later, or raise max_queued_tokens."
        )


def _over_groups(config: SchedulerConfig) -> str:
    """What the pages of a request are the sum of, if layers attend differently."""
    if config.windows == (None,):
        return ""
    groups = Counter(config.windows)
    parts = [
        f"{number:,} that attend to {'all' if window is None else f'{window:,} tokens'}"
        for window, number in groups.items()
    ]
    return (
        f" over {config.num_groups:,} groups of layers ({', '.join(parts)}, "
        f"of steps of at most {config.max_num_batched_tokens:,} tokens)"
    )
