"""A control token that somebody wrote is text, encoded as the tokenizer would if it were no control token."""

import itertools
import json
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.control_tokens import ControlTokens

CONTROL = ["<unk>", "<s>", "</s>", "<|eot|>"]
MERGES = [
    ("(", "'"), ("'", ")"), ("<", "/"), ("▁", "<"), ("p", "r"), ("pr", "i"), ("pri", "n"),
    ("prin", "t"), ("▁", "print"),
]  # fmt: skip
TEXTS = ["print('</s>')", "</s>", " </s> ", "a</s>b", "x <s></s>\n</s>", "</ s>", "<|eot|>é</s>", "</s><tool>", "ok"]


def bpe(**options) -> Tokenizer:
    letters = sorted(set("".join(map("".join, MERGES)) + "abeostxINST[]/|<> \n▁" + "".join(map(chr, range(33, 127)))))
    letters += sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters))
    tokens = [*CONTROL, *letters, *(left + right for left, right in MERGES)]
    vocab = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True, **options))


def add_tokens(tokenizer: Tokenizer, **attributes) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL[:3]])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])  # whole, and yet text
    tokenizer.add_special_tokens([AddedToken("<|eot|>", **({"normalized": False, "special": True} | attributes))])
    return tokenizer


def prepending():
    """Llama 2's and Mistral's: each text between control tokens begins with a space."""
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return add_tokens(tokenizer)


def metaspace(scheme):
    tokenizer = bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    return add_tokens(tokenizer)


def byte_level():
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return add_tokens(tokenizer)


def greedy():
    """Control tokens take the spaces beside them."""
    tokenizer = bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    return add_tokens(tokenizer, lstrip=True, rstrip=True)


def normalized():
    """A control token is also found in other spellings."""
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.Lowercase()
    return add_tokens(tokenizer, normalized=True)


TOKENIZERS = {
    "prepend": prepending,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "byte level": byte_level,
    "lstrip and rstrip": greedy,
    "normalized": normalized,
}


def control_tokens_of(tokenizer: Tokenizer) -> ControlTokens:
    return ControlTokens(SimpleNamespace(backend_tokenizer=tokenizer))


def expected(tokenizer: Tokenizer, begin: str, text: str, end: str) -> list[int]:
    """With other names for the template's control tokens, and none for those in the text."""
    state = json.loads(tokenizer.to_str())
    names = {token: f"<{'0' * 30}{i}>" for i, token in enumerate(CONTROL)}
    for token in state["added_tokens"]:
        name = names.get(token["content"], token["content"])
        if name != token["content"] and token["content"] in state["model"]["vocab"]:
            state["model"]["vocab"][name] = state["model"]["vocab"].pop(token["content"])
        token["content"] = name
    state["model"]["unk_token"] = names["<unk>"]
    for token, name in names.items():
        begin, end = begin.replace(token, name), end.replace(token, name)
    return Tokenizer.from_str(json.dumps(state)).encode(begin + text + end, add_special_tokens=False).ids


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_written_control_token_is_encoded_with_its_surroundings_as_if_it_were_none(make):
    tokenizer = make()
    control_tokens = control_tokens_of(tokenizer)
    for text, begin, end in itertools.product(
        TEXTS, ["<s>[INST] ", "", "[INST]</s>"], ["<|eot|>[/INST] ", "</s>", " x"]
    ):
        parts = control_tokens.parts(lambda text, begin=begin, end=end: begin + text + end, text)
        assert "".join(parts) == begin + text + end
        assert control_tokens.encode(parts) == expected(tokenizer, begin, text, end), (begin, text, end)


def test_a_text_without_control_tokens_is_encoded_as_ever():
    tokenizer = prepending()
    control_tokens = control_tokens_of(tokenizer)
    text = "<s>[INST] print [/INST]</s>"
    assert control_tokens.encode([text]) == tokenizer.encode(text).ids
    assert "_renamed" not in vars(control_tokens), "nothing was made for what nobody has written"


def test_another_spelling_of_a_control_token_is_text_too():
    tokenizer = normalized()
    control_tokens = control_tokens_of(tokenizer)
    eot = tokenizer.token_to_id("<|eot|>")
    assert eot in tokenizer.encode("<|EOT|>").ids
    parts = control_tokens.parts(lambda text: f"<s>{text}<|eot|>", "a<|EOT|>b")
    assert control_tokens.encode(parts).count(eot) == 1


@pytest.mark.parametrize("model", [
    models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -1.0) for c in "</s>ab")], unk_id=0),
    models.BPE(
        {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *"</s>ab", "</", "s>"])},
        [("<", "/"), ("s", ">"), ("</", "s>")],
        unk_token="<unk>",
    ),
], ids=["unigram", "bpe"])  # fmt: skip
def test_a_vocabulary_that_leads_to_a_control_token_by_itself_gives_text(model):
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL[:3]])
    assert 2 in tokenizer.encode("a</s>").ids
    control_tokens = control_tokens_of(tokenizer)
    token_ids = control_tokens.encode(control_tokens.parts(lambda text: f"<s>{text}</s>", "a</s>b"))
    assert [token_id for token_id in token_ids if token_id < 3] == [1, 2]
    assert "".join(map(tokenizer.id_to_token, token_ids)) == "<s>a</s>b</s>"


def test_a_template_that_changes_case_finds_no_trace_of_the_cuts():
    control_tokens = control_tokens_of(prepending())
    assert "".join(control_tokens.parts(lambda text: text.upper() + text.lower(), "a</s>")) == "A</S>a</s>"
