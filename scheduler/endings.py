"""The tokens that end a request."""

from collections.abc import Sequence

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.request import Request, RequestStatus


def ending(request: Request, token_id: int, num_tokens: int, config: SchedulerConfig) -> RequestStatus | None:
    """How a request ends with this token, which makes it `num_tokens` long; None if it goes on."""
    if token_id in request.stop_token_ids and num_tokens >= request.num_prompt_tokens + request.min_tokens:
        return RequestStatus.FINISHED_STOP
    if num_tokens == config.max_total_tokens(request.num_prompt_tokens, request.max_tokens):
        return RequestStatus.FINISHED_LENGTH
    return None


def up_to_end(
    request: Request, token_ids: Sequence[int], config: SchedulerConfig
) -> tuple[list[int], RequestStatus | None]:
    """Those of the tokens after all that the request has which belong to it, and how it ends, if so."""
    for number, token_id in enumerate(token_ids, 1):
        if (status := ending(request, token_id, request.num_tokens + number, config)) is not None:
            return list(token_ids[:number]), status
    return list(token_ids), None
