"""A tokenizer from the metadata of a GGUF file, equal to the one of the model's original repository.

Importing this module imports transformers, which takes a second; so `GGUFCheckpoint` does it only on demand.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxllm.errors import TokenizerNotFoundError, UnsupportedModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece spells it
FIELDS_BY_KIND: dict[str, tuple[str, ...]] = {
    "gpt2": ("tokens", "token_type", "merges"),
    "llama": ("tokens", "token_type", "scores"),
}
"""What each `tokenizer.ggml.model` needs: byte-level BPE, and SentencePiece's BPE."""

# How text is cut into words before merging, as published with each vocabulary.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}"
QWEN2_WORDS = rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{REST}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class ByteLevelVariant:
    """In what the byte-level tokenizers differ."""

    words: str | None = None  # pattern that cuts text into words; None: GPT-2's
    single_digits: bool = False  # each digit is a word
    nfc: bool = False  # text is brought into Unicode's composed form first
    whole_words_first: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise


LLAMA3 = ByteLevelVariant(words=LLAMA3_WORDS, whole_words_first=True, adds_bos=True)
VARIANTS = {
    "default": ByteLevelVariant(),
    "gpt-2": ByteLevelVariant(),
    "smollm": ByteLevelVariant(single_digits=True),
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "tekken": ByteLevelVariant(words=TEKKEN_WORDS, whole_words_first=True, adds_bos=True),
    "qwen2": ByteLevelVariant(words=QWEN2_WORDS, nfc=True),
    "deepseek-r1-qwen": ByteLevelVariant(words=QWEN2_WORDS),
}
"""By `tokenizer.ggml.pre`."""


class GGUFTokenizer(PreTrainedTokenizerFast):
    """Adopts `backend`. As `tokenizer_object` it would be copied, which takes seconds for 262k tokens."""

    def __init__(self, backend: Tokenizer, **kwargs: Any) -> None:
        self._tokenizer = backend
        super().__init__(**kwargs)


def build_tokenizer(metadata: dict[str, Any], source: str) -> GGUFTokenizer:
    """`metadata` of the whole file; `source` is for messages.

    Raises TokenizerNotFoundError if there is no vocabulary, UnsupportedModelError for an unknown kind.
    """
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = fields.get("model")
    if kind not in (None, *FIELDS_BY_KIND):
        raise UnsupportedModelError(
            f"{source} has a tokenizer of kind {kind!r}; this version knows {', '.join(FIELDS_BY_KIND)}."
        )
    needed = ("model",) if kind is None else FIELDS_BY_KIND[kind]
    if missing := [name for name in needed if name not in fields]:
        raise TokenizerNotFoundError(
            f"{source} holds weights but no complete tokenizer: it lacks tokenizer.ggml.{missing[0]}."
        )
    tokens: list[str] = fields["tokens"]
    if kind == "gpt2":
        variant = _variant(fields.get("pre"), source)
        adds_bos = variant.adds_bos
        backend = _byte_level(tokens, fields["merges"], variant)
    else:
        adds_bos = True
        backend = _sentencepiece(fields)
    _add_whole_tokens(backend, tokens, fields["token_type"])

    special_ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special_tokens = {
        f"{name}_token": tokens[fields[f"{stored}_token_id"]]
        for name, stored in special_ids.items()
        if f"{stored}_token_id" in fields
    }
    return GGUFTokenizer(
        backend,
        **special_tokens,
        add_bos_token=fields.get("add_bos_token", adds_bos),
        add_eos_token=fields.get("add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=metadata[f"{metadata['general.architecture']}.context_length"],
    )


def _variant(pre: str | None, source: str) -> ByteLevelVariant:
    if pre not in VARIANTS:
        raise UnsupportedModelError(
            f"{source} cuts text into words by tokenizer.ggml.pre = {pre!r}; this version knows {', '.join(VARIANTS)}."
        )
    return VARIANTS[pre]


def _byte_level(tokens: list[str], merges: list[str], variant: ByteLevelVariant) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=variant.whole_words_first))
    if variant.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if variant.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if variant.words is not None:
        steps.append(pre_tokenizers.Split(Regex(variant.words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=variant.words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: dict[str, Any]) -> Tokenizer:
    # Runs of spaces are stored as spaces, but text is merged after its spaces were respelled.
    tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in fields["tokens"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, fields["token_type"].tolist(), fields["scores"].tolist()),
            unk_token=tokens[fields["unknown_token_id"]] if "unknown_token_id" in fields else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_prefix = fields.get("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if adds_prefix else "never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix:
        steps.append(decoders.Strip(" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, in the order in which SentencePiece would merge them.

    It merges the neighbours whose union has the best score. User-defined tokens come before all others, in
    the order of their ids; their scores mean nothing.
    """
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    best_first = sorted(
        (i for i, token in enumerate(tokens) if len(token) > 1 and token in mergeable),
        key=lambda i: (0, 0.0) if types[i] == USER_DEFINED else (1, -scores[i]),
    )
    return [
        (left, right)
        for token in map(tokens.__getitem__, best_first)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in mergeable and (right := token[cut:]) in mergeable
    ]


def _add_whole_tokens(backend: Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    """Tokens that are found in a text before it is cut into words. Decoding can skip the control tokens."""
    whole = {
        kind: [AddedToken(tokens[i], normalized=False, special=kind == CONTROL) for i in np.flatnonzero(types == kind)]
        for kind in (CONTROL, USER_DEFINED)
    }
    backend.add_special_tokens(whole[CONTROL])
    # A run of spaces is no longer in the vocabulary under its own name, see `_sentencepiece`.
    backend.add_tokens([token for token in whole[USER_DEFINED] if backend.token_to_id(token.content) is not None])
