import bisect
import gc
import random
import time
import weakref

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxllm.engine.text.detokenizer import _BYTE_OF_CHARACTER, Detokenizer
from jaxllm.engine.text.output_processor import OutputProcessor
from jaxllm.errors import UnsupportedModelError

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello there, hello world! hello you"] * 5
SPECIAL = ["<s>", "</s>"]
HARD = [
    "hello world",
    " two leading spaces,  two inside and two at the end  ",
    "line\nbreaks\r\n\tand tabs",
    "naïve café, e\u0301 combining",
    "日本語とひらがな 中文 한국어 हिन्दी العربية",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇸 👍🏽",
    "a real � beside 𝕳𝖊𝖑𝖑𝖔 and ﷽",
    "hello</s> the<s>fox",
    "",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    # Two emoji share three bytes: a token that ends amid a character is trained.
    tokenizer.train_from_iterator([*CORPUS, "😀 😁 😂 日本 " * 20], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Byte tokens are not special in real vocabularies: rebuild with the model alone.
    plain = Tokenizer(tokenizer.model)
    plain.normalizer, plain.decoder = tokenizer.normalizer, tokenizer.decoder
    plain.add_special_tokens(["<unk>", *SPECIAL])
    return plain


def unigram() -> Tokenizer:
    """Like T5's: Metaspace, no byte tokens."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_pieces() -> Tokenizer:
    words = ["<unk>", *SPECIAL, "hello", "wor", "##ld", "the", "##re", "##,", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: tokens joined by spaces."""
    vocabulary = {word: id_ for id_, word in enumerate(["<unk>", *SPECIAL, "hello", "world", "😀"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, unigram, word_pieces, words])
def tokenizer(request) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=request.param())


@pytest.fixture(scope="module")
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level())


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def byte_spelling_tokenizer(request) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=request.param())


def spell(tokenizer, data: bytes) -> list[int]:
    """The tokens of single bytes."""
    byte_level_names = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
    token_id = tokenizer.backend_tokenizer.token_to_id
    token_ids = [token_id(f"<0x{byte:02X}>") or token_id(byte_level_names[byte]) for byte in data]
    assert None not in token_ids
    return token_ids


def decode_in_pieces(tokenizer, token_ids, *, prompt_token_ids=(), skip_special_tokens=True, size=1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.append(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return [*pieces, detokenizer.finish()]


def decode_at_once(tokenizer, token_ids, prompt_token_ids=(), skip_special_tokens=True) -> str:
    """The tokenizers library's own decoding of everything, less that of the prompt."""
    backend = tokenizer.backend_tokenizer
    prompt = backend.decode(list(prompt_token_ids), skip_special_tokens=skip_special_tokens)
    text = backend.decode([*prompt_token_ids, *token_ids], skip_special_tokens=skip_special_tokens)
    assert text.startswith(prompt)
    return text[len(prompt) :]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("text", HARD)
def test_pieces_join_to_what_is_decoded_at_once(tokenizer, text, skip_special_tokens):
    token_ids = tokenizer.backend_tokenizer.encode(text).ids
    expected = decode_at_once(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)
    for size in (1, 2, 3, len(token_ids) or 1):
        pieces = decode_in_pieces(tokenizer, token_ids, skip_special_tokens=skip_special_tokens, size=size)
        assert "".join(pieces) == expected
        if text.isascii():
            assert pieces[-1] == ""


def test_the_prompt_decides_about_a_leading_space(tokenizer):
    backend = tokenizer.backend_tokenizer
    token_ids = backend.encode("hello world").ids
    start_of_text = [backend.token_to_id("<s>")]
    for prompt in ([], start_of_text, start_of_text * 5, backend.encode("hello").ids, token_ids * 3):
        for skip_special_tokens in (True, False):
            pieces = decode_in_pieces(
                tokenizer, token_ids, prompt_token_ids=prompt, skip_special_tokens=skip_special_tokens
            )
            assert "".join(pieces) == decode_at_once(tokenizer, token_ids, prompt, skip_special_tokens)


def test_text_comes_as_soon_as_its_characters_are_complete(byte_spelling_tokenizer):
    token_ids = spell(byte_spelling_tokenizer, "한a🙃".encode())
    assert decode_in_pieces(byte_spelling_tokenizer, token_ids) == ["", "", "한", "a", "", "", "", "🙃", ""]
    assert decode_in_pieces(byte_spelling_tokenizer, token_ids[:-1]) == [
        "",
        "",
        "한",
        "a",
        "",
        "",
        "",
        "\ufffd",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_any_tokens_of_a_byte_level_vocabulary_decode_as_at_once(byte_level_tokenizer, seed):
    rng = random.Random(seed)
    single_bytes = spell(byte_level_tokenizer, bytes(range(256)))
    for _ in range(100):
        for pool in (range(len(byte_level_tokenizer)), single_bytes):
            token_ids = rng.choices(pool, k=rng.randrange(60))
            pieces = decode_in_pieces(byte_level_tokenizer, token_ids, size=rng.randrange(1, 9))
            assert "".join(pieces) == decode_at_once(byte_level_tokenizer, token_ids)


def test_the_byte_characters_are_those_of_the_tokenizers_library():
    assert set(_BYTE_OF_CHARACTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_BYTE_OF_CHARACTER.values()) == list(range(256))


def test_invalid_bytes_leave_valid_characters_beside_them_alone(byte_spelling_tokenizer):
    token_ids = spell(byte_spelling_tokenizer, b"\xff" + "你".encode() + b"\xff" + "好".encode() + b"\xe4!")
    assert "".join(decode_in_pieces(byte_spelling_tokenizer, token_ids)) == "\ufffd你\ufffd好\ufffd!"


def test_a_character_begun_by_the_prompt_belongs_to_the_output(byte_spelling_tokenizer):
    token_ids = spell(byte_spelling_tokenizer, "a한🙃".encode())
    for num_bytes, expected in [(1, "한🙃"), (2, "한🙃"), (3, "한🙃"), (4, "🙃"), (7, "🙃"), (8, "")]:
        pieces = decode_in_pieces(
            byte_spelling_tokenizer, token_ids[num_bytes:], prompt_token_ids=token_ids[:num_bytes]
        )
        assert "".join(pieces) == expected


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    hello = tokenizer.backend_tokenizer.encode("hello").ids
    padding = [len(tokenizer), len(tokenizer) + 100]
    pieces = decode_in_pieces(tokenizer, padding + hello + padding, prompt_token_ids=padding)
    assert "".join(pieces) == decode_at_once(tokenizer, hello)


def test_time_is_linear_in_tokens_without_text_and_in_the_prompt(byte_level_tokenizer):
    """Decoding again what is held back takes seconds for these."""
    started = time.process_time()
    end_token_id = byte_level_tokenizer.backend_tokenizer.token_to_id("</s>")
    for token_id in (end_token_id, *spell(byte_level_tokenizer, b"\xff")):
        decode_in_pieces(byte_level_tokenizer, [token_id] * 20_000, prompt_token_ids=[token_id] * 100_000)
    assert time.process_time() - started < 5


def test_a_decoder_that_looks_ahead_is_refused():
    backend = Tokenizer(models.WordLevel({"a</w>": 0}, unk_token="a</w>"))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(UnsupportedModelError, match="BPEDecoder"):
        OutputProcessor(PreTrainedTokenizerFast(tokenizer_object=backend))  # at the start, not at a request


def test_a_tokenizer_is_not_kept_alive():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words())
    decode_in_pieces(tokenizer, [3, 4])
    reference = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_each_token_is_told_where_its_text_begins(byte_spelling_tokenizer, skip_special_tokens):
    """Also amid characters, behind bytes that form none, behind tokens that are not shown, and behind a prompt."""
    tokenizer, dice = byte_spelling_tokenizer, random.Random(1)
    pieces = [
        spell(tokenizer, data)
        for data in (b"a", b"\xe2\x82\xac", b"\xe2", b"\x82", b"\xf0\x9f", b"\xef\xbf\xbd", b"\xff")
    ]
    pieces += [tokenizer.backend_tokenizer.encode(text).ids for text in ("hello 😀 the", "</s>")]
    for _ in range(300):
        prompt, token_ids = (
            [token_id for piece in dice.choices(pieces, k=k) for token_id in piece] for k in (dice.randrange(3), 8)
        )
        options = {"prompt_token_ids": prompt, "skip_special_tokens": skip_special_tokens}
        detokenizer, offsets, text, shown = Detokenizer(tokenizer, **options), [], "", b""
        held = detokenizer._utf8.getstate()[0]
        bytes_of = Detokenizer(tokenizer, **options)._bytes_of_next
        ends = [len(held)]
        for token_id in token_ids:
            new, begin = detokenizer.append_one(token_id)
            offsets.append(len(text) + begin)
            text += new
            shown += bytes_of(token_id)
            ends.append(len(held) + len(shown))
        text += detokenizer.finish()
        begins = character_begins(held + shown)
        assert len(begins) == len(text)
        for offset, start, end in zip(offsets, ends, ends[1:], strict=False):
            if end > start:
                assert offset == bisect.bisect_right(begins, start) - 1


def character_begins(data: bytes) -> list[int]:
    """Of each character that bytes decode to, the index of its first byte."""
    begins, start = [], 0
    while start < len(data):
        try:
            valid, skipped = data[start:].decode(), 0
        except UnicodeDecodeError as error:
            valid, skipped = data[start : start + error.start].decode(), error.end - error.start
        for character in valid:
            begins.append(start)
            start += len(character.encode())
        if skipped:
            begins.append(start)
            start += skipped
    return begins
