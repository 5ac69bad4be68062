"""Log-probabilities of tokens: in the form of completions, and in that of chat completions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from jaxllm import TokenLogprobs

TokenText = Callable[[int], tuple[str, bytes]]
"""`AsyncLLM.token_text`."""

AppendOne = Callable[[int], tuple[str, int]]
"""`append_one` of an `AsyncLLM.detokenizer`."""

_LOWEST = -9999.0  # where JSON has no word for minus infinity; as OpenAI's own


class CompletionLogprobs(BaseModel):
    """Lists of one entry for each token. A token that is no whole character is written as `bytes:\\xe2\\x82`."""

    text_offset: list[int]
    """Where the text of the token begins in that of the choice. The tokens of one character all begin at it; one that
    is not shown begins where it would be, and one that a stop text has cut off may begin beyond the end."""

    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None
    """The most likely tokens, and the one that was taken."""


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobsWriter:
    """Makes the lists of one choice, piece by piece.

    num_top: how many alternatives were asked for; 0 leaves them out.
    append_one: of a detokenizer of its own, like that which makes the text of the choice.
    """

    def __init__(self, token_text: TokenText, num_top: int, append_one: AppendOne) -> None:
        self._token_text = token_text
        self._num_top = num_top
        self._append_one = append_one
        self._text_len = 0

    def write(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The fields of `CompletionLogprobs` for the next tokens."""
        tokens, offsets = [], []
        for entry in logprobs:
            tokens.append(self._name(entry.token_id))
            text, begin = self._append_one(entry.token_id)
            offsets.append(self._text_len + begin)
            self._text_len += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [self._top(entry) for entry in logprobs] if self._num_top else None,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        ids = [*entry.top[: self._num_top], (entry.token_id, entry.logprob)]
        return {self._name(token_id): _finite(logprob) for token_id, logprob in ids}

    def _name(self, token_id: int) -> str:
        text, data = self._token_text(token_id)
        if text.encode() == data:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(token_text: TokenText, logprobs: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The fields of a `ChatTokenLogprob` for each token."""
    return [
        _chat_token(token_text, entry.token_id, entry.logprob)
        | {"top_logprobs": [_chat_token(token_text, *top) for top in entry.top[:num_top]]}
        for entry in logprobs
    ]


def _chat_token(token_text: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    text, data = token_text(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
