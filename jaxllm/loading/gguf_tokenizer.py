"""A tokenizer from the metadata of a GGUF file, equal to the one of the model's original repository.

Where the file leaves something open, it is as llama.cpp has it (src/llama-vocab.cpp). Importing this module imports
transformers, which takes a second; so `GGUFCheckpoint` does it only on demand.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxllm.errors import CorruptCheckpointError, TokenizerNotFoundError, UnsupportedModelError
from jaxllm.loading.gguf_config import TURN_ENDS, token_id

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece spells it
FIELDS_BY_KIND: dict[str, tuple[str, ...]] = {
    "gpt2": ("tokens", "token_type", "merges"),
    "llama": ("tokens", "token_type", "scores"),
}
"""What each `tokenizer.ggml.model` needs: byte-level BPE, and SentencePiece's BPE."""

SPECIAL_TOKENS = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls", "mask": "mask"
}  # fmt: skip
"""Names of transformers, and how `tokenizer.ggml.…_token_id` spells them."""
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # unless the file says otherwise
REFUSED = (
    "add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap", "normalizer.lowercase",
    "normalizer.strip_accents", "suppress_tokens",
)  # fmt: skip
"""Fields that change tokens in a way that is not known here, unless they are false or empty."""

# How text is cut into words before merging, as published with each vocabulary.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
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

    words: tuple[str, ...] = (GPT2_WORDS,)  # patterns that cut text into words, each what the one before has left
    nfc: bool = False  # text is brought into Unicode's composed form first
    whole_words_first: bool = False  # a word that is a token stays whole, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise


LLAMA3 = ByteLevelVariant(words=(LLAMA3_WORDS,), whole_words_first=True, adds_bos=True)
VARIANTS = {
    "default": ByteLevelVariant(words=(r"[\p{P}$+<=>^~|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": ByteLevelVariant(),
    "smollm": ByteLevelVariant(words=(r"\p{N}", GPT2_WORDS)),
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "tekken": ByteLevelVariant(words=(TEKKEN_WORDS,), whole_words_first=True, adds_bos=True),
    "qwen2": ByteLevelVariant(words=(QWEN2_WORDS,), nfc=True),
    "deepseek-r1-qwen": ByteLevelVariant(words=(QWEN2_WORDS,)),
}
"""By `tokenizer.ggml.pre`."""


class GGUFTokenizer(PreTrainedTokenizerFast):
    """Adopts `backend`. As `tokenizer_object` it would be copied, which takes seconds for 262k tokens."""

    def __init__(self, backend: Tokenizer, **kwargs: Any) -> None:
        self._tokenizer = backend
        super().__init__(**kwargs)


def build_tokenizer(metadata: dict[str, Any], source: str) -> GGUFTokenizer:
    """`metadata` of the whole file; `source` is for messages.

    Raises TokenizerNotFoundError if there is no vocabulary, CorruptCheckpointError if it contradicts itself,
    UnsupportedModelError for an unknown kind.
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
    if refused := [name for name in REFUSED if _is_set(fields.get(name, False))]:
        raise UnsupportedModelError(
            f"{source} has a tokenizer with tokenizer.ggml.{refused[0]}, which this version does not know."
        )
    # Tokens without a text are of no use, but may be several.
    tokens = fields["tokens"] = [token or f"[EMPTY_{i}]" for i, token in enumerate(fields["tokens"])]
    if len(set(tokens)) < len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        raise CorruptCheckpointError(f"{source} has the token {twice!r} twice in its vocabulary. Convert it again.")
    special_ids = SENTENCEPIECE_IDS if kind == "llama" else {}
    special_ids = special_ids | {
        name: found for name in SPECIAL_TOKENS.values() if (found := token_id(metadata, name)) is not None
    }
    if kind == "gpt2":
        variant = _variant(fields.get("pre"), source)
        adds_bos = variant.adds_bos
        backend = _byte_level(tokens, fields["merges"], variant)
    else:
        adds_bos = True
        backend = _sentencepiece(fields, special_ids["unknown"])
    _add_whole_tokens(backend, tokens, fields["token_type"])

    special_tokens = {
        f"{name}_token": tokens[special_ids[stored]] for name, stored in SPECIAL_TOKENS.items() if stored in special_ids
    }
    adds = {name: fields.get(f"add_{name}_token", adds_bos and name == "bos") for name in ("bos", "eos")}
    for name, is_added in adds.items():
        if is_added and f"{name}_token" not in special_tokens:
            raise CorruptCheckpointError(
                f"{source} adds a token ({name}) to each prompt, but lacks a valid tokenizer.ggml.{name}_token_id. "
                f"Convert it again, or with tokenizer.ggml.add_{name}_token = false."
            )
    return GGUFTokenizer(
        backend,
        **special_tokens,
        add_bos_token=adds["bos"],
        add_eos_token=adds["eos"],
        chat_template=_chat_template(metadata),
        clean_up_tokenization_spaces=False,
        model_max_length=metadata[f"{metadata['general.architecture']}.context_length"],
    )


def _is_set(value: Any) -> bool:
    return bool(value) if np.ndim(value) == 0 else len(value) > 0


def _chat_template(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """One, or several by their names, of which "default" is the first."""
    default = metadata.get("tokenizer.chat_template")
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in metadata.get("tokenizer.chat_templates", ())}
    return ({"default": default} if default is not None else {}) | named if named else default


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
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in variant.words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: dict[str, Any], unknown_id: int) -> Tokenizer:
    # Runs of spaces are stored as spaces, but text is merged after its spaces were respelled.
    tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in fields["tokens"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, fields["token_type"].tolist(), fields["scores"].tolist()),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_prefix = fields.get("add_space_prefix", True)
    respelling = normalizers.Replace(" ", SPACE)
    # Each text between whole tokens has a normalization of its own, and so a space before it.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), respelling]) if adds_prefix else respelling
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
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind not in (UNKNOWN, CONTROL, BYTE)}
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
    """Tokens that are found in a text before it is cut into words. Decoding can skip the control tokens.

    Those that end turns are control tokens whatever the file says.
    """
    is_control = np.isin(types, (UNKNOWN, CONTROL)) | np.array([token in TURN_ENDS for token in tokens])
    for ids, is_special in ((is_control, True), ((types == USER_DEFINED) & ~is_control, False)):
        whole = [AddedToken(tokens[i], normalized=False, special=is_special) for i in np.flatnonzero(ids)]
        # A run of spaces is no longer in the vocabulary under its own name, see `_sentencepiece`.
        backend.add_tokens([token for token in whole if backend.token_to_id(token.content) is not None])
