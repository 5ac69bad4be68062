"""From token ids to text, while the tokens come.

A token stands for bytes rather than characters (an emoji may take four tokens), so each token is turned into
its bytes and an incremental UTF-8 decoder does the rest: linear time, and nothing is decoded twice.

Why not ``tokenizers.decoders.DecodeStream`` (0.23): it raises when an invalid byte follows a character made
of byte tokens, has no way to return what it holds back at the end, withholds a real U+FFFD, and takes
quadratic time for a run of tokens without text.
"""

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, decoders

from jaxllm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT_CHARACTER = "\ufffd"
_MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character

# Byte-level tokenizers (GPT-2's and its heirs) write a visible byte as the character of that number, and the
# other bytes, in order, as the characters from 256 on.
_VISIBLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = sorted(set(range(256)) - set(_VISIBLE_BYTES))
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _VISIBLE_BYTES} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHER_BYTES)
}
# Byte-fallback tokenizers (SentencePiece's) spell the bytes of a character that they have no token for.
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Detokenizer:
    """Decodes the output of one request.

    The pieces of text join to what the tokenizer decodes from prompt and output at once, less the prompt's
    text. A character begun by the prompt belongs to the output. Bytes that form no character become U+FFFD,
    as with Python's ``errors="replace"``; in a byte-fallback tokenizer they leave valid characters beside
    them alone, as SentencePiece does and the `tokenizers` library does not.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._vocabulary = _vocabulary_of(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

        end_of_prompt = b""
        for token_id in reversed(prompt_token_ids):
            if len(end_of_prompt) >= _MAX_INCOMPLETE_BYTES:
                break
            if self._is_shown(token_id):
                end_of_prompt = self._vocabulary.token_bytes(token_id) + end_of_prompt
        self._at_start = not end_of_prompt
        self._utf8.decode(end_of_prompt)

    def append(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete. The bytes of an incomplete character are held back."""
        return self._utf8.decode(b"".join(map(self._bytes_of_next, token_ids)))

    def append_one(self, token_id: int) -> tuple[str, int]:
        """As `append`, and where in the text that it returns the token's own begins: at 1 behind the U+FFFD of bytes
        that the token did not make a character of, else at 0, be it in the middle of a character."""
        held, data = self._utf8.getstate()[0], self._bytes_of_next(token_id)
        text = self._utf8.decode(data)
        return text, int(bool(held and text) and not (held + data).startswith(text[0].encode()))

    def finish(self) -> str:
        """Returns what is held back when no more tokens come: nothing, or one U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _bytes_of_next(self, token_id: int) -> bytes:
        if not self._is_shown(token_id):
            return b""
        at_start, self._at_start = self._at_start, False
        return self._vocabulary.token_bytes(token_id, at_start=at_start)

    def _is_shown(self, token_id: int) -> bool:
        special = self._skip_special_tokens and token_id in self._vocabulary.special_token_ids
        return not special and self._vocabulary.knows(token_id)


def token_bytes(tokenizer: "PreTrainedTokenizerFast", token_id: int) -> bytes:
    """What a token adds to a text, special tokens included. Nothing for an id that pads the vocabulary."""
    vocabulary = _vocabulary_of(tokenizer)
    return vocabulary.token_bytes(token_id) if vocabulary.knows(token_id) else b""


class _Vocabulary:
    """The bytes of a tokenizer's tokens, found when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if isinstance(tokenizer.decoder, decoders.BPEDecoder | decoders.CTC):
            raise UnsupportedModelError(
                f"the tokenizer decodes with {tokenizer.decoder!r}, where a token's text depends on the next "
                "one; decoders for byte-level, SentencePiece and WordPiece vocabularies are supported."
            )
        self._tokenizer = tokenizer
        self.special_token_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # The first token of a text may decode differently, so others are looked at behind some plain token.
        vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._before = next(([id_] for id_ in range(vocab_size) if self._decode([id_]).isalnum()), [])
        self._bytes: dict[int, bytes] = {}

    def knows(self, token_id: int) -> bool:
        """False for the ids that pad a model's vocabulary to a round size."""
        return self._tokenizer.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """What a token adds to a text; ``at_start``: as the first token of the text."""
        if at_start:
            return self._find_bytes(token_id, before=[])
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id, before=self._before)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int, before: list[int]) -> bytes:
        text = self._decode([*before, token_id])[len(self._decode(before)) :]
        if _REPLACEMENT_CHARACTER in text:  # part of a character
            token = self._tokenizer.id_to_token(token_id) or ""
            if byte_token := _BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(byte_token[1])
            if all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


_vocabularies: "WeakKeyDictionary[PreTrainedTokenizerFast, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(tokenizer: "PreTrainedTokenizerFast") -> _Vocabulary:
    """One for each tokenizer, shared by its detokenizers, so that a token is looked up once."""
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer.backend_tokenizer)
    return _vocabularies[tokenizer]
