"""How the tokens of one request are chosen, and when they end."""

import functools
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from jaxllm.errors import InvalidRequestError
from jaxllm.options import checked_options

_GREEDY_BELOW = 1e-5  # as in vLLM; logits divided by much less overflow float32
_SMALLEST_FLOAT = math.ulp(0.0)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_INT32 = 2**31 - 1
_GOLDEN_RATIO = 0x9E3779B1  # odd, so that its multiples are distinct in 32 bits

MAX_N = 128
MAX_LOGPROBS = 20


@checked_options(InvalidRequestError)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of one request, under vLLM's names.

    They are checked here: an InvalidRequestError names the value, the limit and the fix. numpy scalars become
    Python numbers; ``stop`` and ``stop_token_ids`` become tuples.
    """

    temperature: float = 1.0
    """Divides the logits. 0, or anything below 1e-5, always takes the most likely token."""

    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to at least this. 1 is off."""

    top_k: int = 0
    """Sample from this many most likely tokens. 0 is off; so is -1."""

    min_p: float = 0.0
    """Sample from the tokens at least this many times as likely as the most likely one. 0 is off."""

    seed: int | None = None
    """Makes the request's tokens repeatable, whatever is served beside it. None (or -1, as in vLLM) draws
    one from the engine's own seed."""

    n: int = 1
    """How many continuations of the prompt; they share its pages. With a seed, each has a seed that follows from it."""

    max_tokens: int | None = 16
    """The most tokens to generate. None means until the model's context is full."""

    min_tokens: int = 0
    """Stop tokens among the first so many tokens, and stop strings in their text, do not end the output."""

    stop: str | Sequence[str] | None = None
    """Texts that end the output."""

    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output, beside the model's own end tokens."""

    ignore_eos: bool = False
    """Do not end at the model's own end tokens."""

    include_stop_str_in_output: bool = False
    """Keep the stop text, or the text of the stop token, that ended the output."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    logprobs: int | None = None
    """Give the log-probability of each token, by the model's own logits, and those of this many most likely ones."""

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)

        temperature = _real("temperature", self.temperature, 0, _MAX_FLOAT32, "a finite number >= 0; 0 is greedy")
        set_field("temperature", temperature if temperature >= _GREEDY_BELOW else 0.0)
        set_field("top_p", _real("top_p", self.top_p, _SMALLEST_FLOAT, 1, "in (0, 1]; 1 turns it off"))
        top_k = _integer("top_k", self.top_k, -1, _MAX_INT32, "an integer in [-1, 2**31); 0 turns it off")
        set_field("top_k", max(top_k, 0))
        set_field("min_p", _real("min_p", self.min_p, 0, 1, "in [0, 1]; 0 turns it off"))

        if self.seed is not None:
            limit = "an integer in [-2**63, 2**64), or None for a fresh one"
            seed = _integer("seed", self.seed, -(2**63), 2**64 - 1, limit)
            set_field("seed", seed if seed != -1 else None)
        set_field("n", _integer("n", self.n, 1, MAX_N, f"an integer in [1, {MAX_N}]"))
        if self.max_tokens is not None:
            limit = "an integer >= 1, or None to fill the model's context"
            set_field("max_tokens", _integer("max_tokens", self.max_tokens, 1, math.inf, limit))
        most = math.inf if self.max_tokens is None else self.max_tokens
        limit = f"an integer in [0, max_tokens], which is {self.max_tokens}"
        set_field("min_tokens", _integer("min_tokens", self.min_tokens, 0, most, limit))

        set_field("stop", _stop_strings(self.stop))
        set_field("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            set_field(name, _flag(name, getattr(self, name)))
        if self.logprobs is not None:
            limit = f"an integer in [0, {MAX_LOGPROBS}], or None for none"
            set_field("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, limit))

    def seed_uint32(self) -> int:
        """The seed in the sampler's 32 bits; without a seed, fresh random bits at each call."""
        if self.seed is None:
            return secrets.randbits(32)
        # A seed of 32 bits stays as it is; the high half of a longer one is spread over the low half.
        return (self.seed + (self.seed >> 32) * _GOLDEN_RATIO) & 0xFFFFFFFF

    def seeds(self) -> list[int | None]:
        """A seed of 32 bits for each of the `n` continuations, all different; None for each without a seed."""
        if self.seed is None:
            return [None] * self.n
        first = self.seed_uint32()
        return [(first + index * _GOLDEN_RATIO) & 0xFFFFFFFF for index in range(self.n)]


def _real(name: str, value: Any, low: float, high: float, limit: str) -> float:
    return float(_number(name, value, Real, low, high, limit))


def _integer(name: str, value: Any, low: float, high: float, limit: str) -> int:
    return int(_number(name, value, Integral, low, high, limit))


def _number(name: str, value: Any, kind: type, low: float, high: float, limit: str) -> Any:
    number = _from_numpy(value)
    is_number = isinstance(number, kind) and not isinstance(number, bool)
    if not (is_number and low <= number <= high):  # not so for NaN
        raise _invalid(name, value, limit)
    return number


def _flag(name: str, value: Any) -> bool:
    flag = _from_numpy(value)
    if not isinstance(flag, bool):
        raise _invalid(name, value, "True or False")
    return flag


def _from_numpy(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _stop_strings(stop: Any) -> tuple[str, ...]:
    limit = "a string of at least one character, or a list of such"
    strings = (stop,) if isinstance(stop, str) else _items("stop", stop, limit)
    if not all(isinstance(string, str) and string for string in strings):
        raise _invalid("stop", stop, limit)
    return strings


def _stop_token_ids(stop_token_ids: Any) -> tuple[int, ...]:
    token_ids = _items("stop_token_ids", stop_token_ids, "a list of token ids")
    limit = "an integer in [0, 2**31)"
    return tuple(_integer("a token id in stop_token_ids", id_, 0, _MAX_INT32, limit) for id_ in token_ids)


def _items(name: str, value: Any, limit: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _invalid(name, value, limit)
    return tuple(value)


def _invalid(name: str, value: Any, limit: str) -> InvalidRequestError:
    param = name.rpartition(" ")[2]  # of "a token id in stop_token_ids"
    return InvalidRequestError(f"{name} is {value!r}; it must be {limit}.", param=param)
