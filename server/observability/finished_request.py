"""What is known of a request at its end: the source of its metrics, its line in the log and its trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxllm import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRequest:
    """A generation that has ended, however it did. Times are of `time.monotonic`.

    endpoint: the path that it came to, such as "/v1/chat/completions".
    key_name: the name of the API key, never the key; "" without one.
    output_lens: tokens of each choice.
    finish_reasons: of each choice, in the same order: "stop", "length", "abort" (the client left), "timeout", "error".
    received: when the server began to read the request.
    first_scheduled, first_token: of the choice that came first; None if that never happened.
    finished: when the last choice ended.
    error: the message, with the finish reason "error".
    trace_headers: `traceparent` and `tracestate` of the HTTP request, in lower case, as far as it has them.
    """

    request_id: str
    endpoint: str
    params: SamplingParams
    num_prompt_tokens: int
    output_lens: Sequence[int]
    finish_reasons: Sequence[str]
    received: float
    finished: float
    first_scheduled: float | None = None
    first_token: float | None = None
    num_cached_tokens: int = 0
    is_streamed: bool = False
    tenant: str = ""
    key_name: str = ""
    priority: int = 0
    error: str | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        """Of all choices together."""
        return sum(self.output_lens)

    @property
    def e2e_s(self) -> float:
        """From the first byte of the request to the last token."""
        return self.finished - self.received

    @property
    def queue_s(self) -> float | None:
        """Until it was in a step for the first time."""
        return None if self.first_scheduled is None else self.first_scheduled - self.received

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.received

    @property
    def prefill_s(self) -> float | None:
        """From its first step to its first token."""
        if self.first_scheduled is None or self.first_token is None:
            return None
        return self.first_token - self.first_scheduled

    @property
    def decode_s(self) -> float | None:
        """From its first token to its last."""
        return None if self.first_token is None else self.finished - self.first_token

    @property
    def inference_s(self) -> float | None:
        """From its first step to its end."""
        return None if self.first_scheduled is None else self.finished - self.first_scheduled

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in the longest choice; None where there is none."""
        num_later_tokens = max(self.output_lens, default=0) - 1
        return self.decode_s / num_later_tokens if self.decode_s is not None and num_later_tokens > 0 else None
