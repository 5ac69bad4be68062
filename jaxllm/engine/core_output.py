"""What a step of the core has brought."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxllm.outputs import FinishReason, TokenLogprobs

Key = str | int
"""Which request: its request_id, or the number that a client of a core process knows it by."""


@dataclass(slots=True)
class CoreOutput:
    """New facts about requests, since the core was last asked. Requests that do not stream tell theirs at the end.

    time: when the tokens became known (``time.monotonic``).
    started: (request, time, num_cached_tokens) of those whose prompt has begun to be computed; cached tokens were
        found in the prefix cache. Once for each request.
    keys: the requests with new tokens, each once.
    num_new_tokens: of each of them; empty if each has exactly one.
    token_ids: request by request.
    logprobs: one for each new token, of the requests that asked for them.
    finished: (request, reason, error) of those that have ended with these tokens, or without any. The core has
        forgotten them.
    """

    time: float = 0.0
    started: list[tuple[Key, float, int]] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[Key, list[TokenLogprobs]] = field(default_factory=dict)
    finished: list[tuple[Key, FinishReason, str | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return bool(self.keys or self.finished or self.started)

    def add_tokens(self, key: Key, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """New tokens, at least one, of a request that `keys` does not have yet."""
        if len(token_ids) != 1 and not self.num_new_tokens:
            self.num_new_tokens = [1] * len(self.keys)
        if len(token_ids) != 1 or self.num_new_tokens:
            self.num_new_tokens.append(len(token_ids))
        self.keys.append(key)
        self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs[key] = logprobs

    def tokens_by_key(self) -> Iterator[tuple[Key, list[int]]]:
        """Each request with its new tokens, of which there is at least one."""
        if not self.num_new_tokens:
            for key, token_id in zip(self.keys, self.token_ids, strict=True):
                yield key, [token_id]
            return
        start = 0
        for key, number in zip(self.keys, self.num_new_tokens, strict=True):
            yield key, self.token_ids[start : start + number]
            start += number

    def joined(self, later: "CoreOutput") -> "CoreOutput":
        """Both as one, with the time of this one."""
        whole = CoreOutput(self.time, started=self.started + later.started, finished=self.finished + later.finished)
        tokens: dict[Key, list[int]] = dict(self.tokens_by_key())
        logprobs = dict(self.logprobs)
        for key, token_ids in later.tokens_by_key():
            tokens[key] = tokens.get(key, []) + token_ids
            if key in later.logprobs:
                logprobs[key] = logprobs.get(key, []) + later.logprobs[key]
        for key, token_ids in tokens.items():
            whole.add_tokens(key, token_ids, logprobs.get(key))
        return whole
