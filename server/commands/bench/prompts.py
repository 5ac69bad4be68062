"""Prompts of a wanted number of tokens, without the server's tokenizer."""

import zlib
from dataclasses import dataclass

import numpy as np

from jaxllm.server.commands.bench.workload import BenchRequest

_WORDS = (
    "the of and to in that it is was for on are as with they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people "
    "my than first water been call who oil its now find long down day did get come made may part over new sound take "
    "only little work know place year live me back give most very after thing our just name good sentence man think "
    "say great where help through much before line right too mean old any same tell boy follow came want show also"
)
WORDS = tuple(_WORDS.split(" "))
"""Common words: one token each in most vocabularies, and the mean is measured."""

PROBES = (" ".join(WORDS[:8]), " ".join(WORDS))


@dataclass(frozen=True)
class TextPrompts:
    """Random words. Requests begin alike only where their prefix says so.

    tokens_per_word, num_other_tokens: what the server makes of a text: so many tokens for each word, and so many
      beside them (the chat template's).
    """

    tokens_per_word: float
    num_other_tokens: float

    @classmethod
    def calibrated(cls, short_len: int, long_len: int) -> "TextPrompts":
        """From the numbers of tokens that the server counts for the two PROBES."""
        short_words, long_words = (len(probe.split()) for probe in PROBES)
        tokens_per_word = (long_len - short_len) / (long_words - short_words)
        return cls(tokens_per_word, max(0.0, short_len - tokens_per_word * short_words))

    def make(self, request: BenchRequest, seed: int, index: int) -> str:
        num_words = max(1, round((request.prompt_len - self.num_other_tokens) / self.tokens_per_word))
        num_shared = min(num_words, round(request.prefix_len / self.tokens_per_word))
        shared = _stream(request, seed).integers(0, len(WORDS), num_shared)
        own = np.random.default_rng((seed, index)).integers(0, len(WORDS), num_words - num_shared)
        return " ".join(WORDS[number] for number in (*shared, *own))


@dataclass(frozen=True)
class TokenIdPrompts:
    """Random token ids below vocab_size, without the low ones, where vocabularies keep special tokens."""

    vocab_size: int

    def make(self, request: BenchRequest, seed: int, index: int) -> list[int]:
        low = min(1000, self.vocab_size // 2)
        shared = _stream(request, seed).integers(low, self.vocab_size, request.prefix_len)
        own = np.random.default_rng((seed, index)).integers(
            low, self.vocab_size, request.prompt_len - request.prefix_len
        )
        return [*shared.tolist(), *own.tolist()]


def _stream(request: BenchRequest, seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, 1 << 32, zlib.crc32(request.prefix.encode())))
