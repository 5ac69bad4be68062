"""Log-probabilities of tokens: in the form of completions, and in that of chat completions."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from jaxllm import TokenLogprobs

TokenText = Callable[[int], tuple[str, bytes]]
"""`AsyncLLM.token_text`, or what `token_namer` makes of it."""

AppendOne = Callable[[int], tuple[str, int]]
"""`append_one` of an `AsyncLLM.detokenizer`."""

AsTokenIds = Annotated[bool | None, Field(description="Call the tokens of logprobs token_id:7, by their ids.")]
"""The field `return_tokens_as_token_ids`."""

_LOWEST = -9999.0  # where JSON has no word for minus infinity; as OpenAI's own


def token_namer(token_text: TokenText, *, as_token_ids: bool = False) -> TokenText:
    """What a token is called, and its bytes. The name is its text, or `bytes:\\xe2\\x82` where that is no whole
    character, as with OpenAI; with `as_token_ids` it is `token_id:7`, as with vLLM."""

    def name(token_id: int) -> tuple[str, bytes]:
        text, data = token_text(token_id)
        if as_token_ids:
            return _id_name(token_id), data
        if text.encode() == data:
            return text, data
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    return name


class CompletionLogprobs(BaseModel):
    """Lists of one entry for each token; see `token_namer` for what it is called."""

    text_offset: list[int]
    """Where the text of the token begins in that of the choice. The tokens of one character all begin at it; one that
    is not shown begins where it would be, and one that a stop text has cut off may begin beyond the end."""

    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]
    """The one that was taken, and the most likely tokens. One whose name another has already is `token_id:7`."""


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

    name_of: of `token_namer`.
    num_top: how many alternatives were asked for.
    append_one: of a detokenizer of its own, like that which makes the text of the choice.
    """

    def __init__(self, name_of: TokenText, num_top: int, append_one: AppendOne) -> None:
        self._name_of = name_of
        self._num_top = num_top
        self._append_one = append_one
        self._text_len = 0

    def write(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The fields of `CompletionLogprobs` for the next tokens."""
        tokens, offsets = [], []
        for entry in logprobs:
            tokens.append(self._name_of(entry.token_id)[0])
            text, begin = self._append_one(entry.token_id)
            offsets.append(self._text_len + begin)
            self._text_len += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [self._top(entry) for entry in logprobs],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._name_of(entry.token_id)[0]: _finite(entry.logprob)}
        for token_id, logprob in entry.top[: self._num_top]:
            if token_id != entry.token_id:
                name = self._name_of(token_id)[0]
                top[_id_name(token_id) if name in top else name] = _finite(logprob)
        return top


def chat_logprobs(name_of: TokenText, logprobs: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The fields of a `ChatTokenLogprob` for each token. `name_of`: of `token_namer`."""
    return [
        _chat_token(name_of, entry.token_id, entry.logprob)
        | {"top_logprobs": [_chat_token(name_of, *top) for top in entry.top[:num_top]]}
        for entry in logprobs
    ]


def _chat_token(name_of: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    name, data = name_of(token_id)
    return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST
