"""A folder's tokenizer.json is honoured as it is, whatever class its config names."""

import json

import pytest
from tiny_models import write_tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxllm.loading.sources import open_checkpoint

SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = [
    "",
    " ",
    "  two spaces",
    "e\u0301 and é",
    "가 \u1100\u1161",
    "a\n\n b</s>c <s> d",
    "🦙 日本",
    "Ω Ω",
    "it's 1234",
]


def byte_level(normalizer=None):
    vocab = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def sentencepiece(prepend_scheme):
    letters = sorted(set("".join(TEXTS)) - {" "})
    vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    model = models.BPE({token: i for i, token in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {
    "bytes as they are": lambda: byte_level(),
    "composed": lambda: byte_level(normalizers.NFC()),
    "lower case": lambda: byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "a word's start before the first text": lambda: sentencepiece("first"),
    "a word's start before each text": lambda: sentencepiece("always"),
    "no word's start": lambda: sentencepiece("never"),
}


@pytest.mark.parametrize("tokenizer_class", ["Qwen2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast", None])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_folders_tokenizer_encodes_as_its_file_says(tmp_path, name, tokenizer_class):
    write_tiny_model("llama", tmp_path)
    theirs = TOKENIZERS[name]()
    theirs.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    theirs.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ 1 }}"}
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    ours = open_checkpoint(str(tmp_path)).tokenizer()
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert (ours.bos_token_id, ours.eos_token_id, ours.chat_template) == (1, 2, "{{ 1 }}")
