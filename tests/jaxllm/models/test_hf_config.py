"""What a config.json says, and what it leaves out, means what it means to transformers."""

from dataclasses import MISSING, fields

import numpy as np
import pytest
from tiny_models import TINY_MODELS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.hf_config import windows_of
from jaxllm.models.model import model_max_len
from jaxllm.models.registry import FAMILIES
from jaxllm.models.rope_parameters import rope_parameters, rope_parameters_by_layer_type

TEXT_FAMILIES = {family.keys.model_type: family for family in FAMILIES.values()}
ARCHITECTURES = {family.keys.model_type: name for name, family in reversed(FAMILIES.items())}

# Keys that the config classes take besides their fields, and what becomes of them.
KEYWORDS = {
    "rope_scaling": lambda theirs: None,
    "rope_theta": lambda theirs: _rope(theirs, "full_attention")["rope_theta"],
    "rope_local_base_freq": lambda theirs: _rope(theirs, "sliding_attention")["rope_theta"],
    "partial_rotary_factor": lambda theirs: _rope(theirs, "full_attention").get("partial_rotary_factor"),
    "original_max_position_embeddings": lambda theirs: getattr(theirs, "original_max_position_embeddings", None),
    "head_dim": lambda theirs: getattr(theirs, "head_dim", None),  # qwen2
    "layer_types": lambda theirs: getattr(theirs, "layer_types", None),  # mistral
    "sliding_window_pattern": lambda theirs: theirs._sliding_window_pattern,
}

WITHOUT_EFFECT = {
    "about the file": {"transformers_version", "architectures", "dtype", "problem_type", "id2label", "label2id"},
    "about what a call returns": {"output_hidden_states", "output_attentions", "return_dict", "use_cache"},
    "for training": {"initializer_range", "attention_dropout"},
    "the same result, computed in pieces": {"chunk_size_feed_forward", "pretraining_tp"},
    "these models are all decoders": {"is_encoder_decoder"},
    "for texts of several lengths side by side": {"pad_token_id"},
    "of the tokenizer": {"bos_token_id"},
    "read by the engine": {"eos_token_id"},
}


def _rope(theirs, layer_type):
    return theirs.rope_parameters.get(layer_type, theirs.rope_parameters)


def read(model_type, stated):
    return TEXT_FAMILIES[model_type].hf_config(stated)


def parse(model_type, stated, max_model_len=1024):
    return TEXT_FAMILIES[model_type].parse_config(read(model_type, stated), max_model_len)


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_every_key_that_is_read_has_the_default_of_transformers(model_type):
    theirs = CONFIG_MAPPING[model_type]
    by_field = {field.name: field.default for field in fields(theirs)}
    for key, default in TEXT_FAMILIES[model_type].keys.defaults.items():
        expected = by_field[key] if key in by_field else KEYWORDS[key](theirs())
        assert (key, default) == (key, expected)


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_every_key_of_transformers_is_read_or_refused_or_without_effect(model_type):
    keys = TEXT_FAMILIES[model_type].keys
    known = {*keys.defaults, *keys.neutral}.union(*WITHOUT_EFFECT.values())
    by_field = {field.name: field.default for field in fields(CONFIG_MAPPING[model_type])}
    assert by_field.keys() - known == set()
    for key in keys.neutral.keys() & by_field.keys():
        assert by_field[key] is not MISSING
        assert keys.neutral[key] == by_field[key]


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_an_empty_config_is_that_of_transformers(model_type):
    ours, theirs = parse(model_type, {}), CONFIG_MAPPING[model_type]()
    assert ours.num_layers == theirs.num_hidden_layers
    head_dim = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert {(spec.num_kv_heads, spec.head_dim) for spec in ours.cache_specs} == {(theirs.num_key_value_heads, head_dim)}
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert _windows(ours) == _their_windows(theirs)


def _windows(ours):
    return tuple(spec.sliding_window for spec in ours.cache_specs)


def _their_windows(theirs):
    """As the layers of transformers read their config."""
    window = getattr(theirs, "sliding_window", None)
    if theirs.model_type == "mistral":
        return (window,) * theirs.num_hidden_layers
    layer_types = getattr(theirs, "layer_types", ["full_attention"] * theirs.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"sliding_window": 8},
        {"sliding_window": None},
        {"sliding_window": 8, "use_sliding_window": False},
        {"sliding_window": 8, "use_sliding_window": True},
        {"sliding_window": 8, "use_sliding_window": True, "num_hidden_layers": 30},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 8, "max_window_layers": 0},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_windows_are_those_of_transformers(model_type, stated):
    stated = {"num_hidden_layers": 4, **stated}
    theirs = _their_windows(CONFIG_MAPPING[model_type](**stated))
    assert _windows(parse(model_type, stated)) == (theirs if model_type != "llama" else (None,) * len(theirs))


@pytest.mark.parametrize(
    "stated",
    [
        {"sliding_window_pattern": 2},
        {"_sliding_window_pattern": 2},
        {"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 8},
        {"sliding_window_pattern": 1, "sliding_window": None},
    ],
)
def test_windows_of_gemma_are_those_of_transformers(stated):
    stated = {"num_hidden_layers": 8, **stated}
    assert _windows(parse("gemma3_text", stated)) == _their_windows(CONFIG_MAPPING["gemma3_text"](**stated))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
ONE_ROTATION = [
    {},
    {"rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 700.0}, "rope_theta": 500.0},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 128}},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 128}, "original_max_position_embeddings": 64},
    {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}, "max_position_embeddings": 4096},
    {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128, "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "original_max_position_embeddings": 64}},
]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("stated", ONE_ROTATION, ids=str)
def test_rope_parameters_are_those_of_transformers(model_type, stated):
    ours = rope_parameters(read(model_type, stated))
    theirs = CONFIG_MAPPING[model_type](**_copied(stated))
    theirs.standardize_rope_params()  # As each of its rotations does before it is computed.
    ours.pop("type", None)
    assert ours == {key: value for key, value in theirs.rope_parameters.items() if key != "type"}


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"rope_theta": 500.0, "rope_local_base_freq": 700.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}, "rope_theta": 500.0},
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}},
        {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    ],
    ids=str,
)
def test_rope_parameters_of_gemma_are_those_of_transformers(stated):
    hf = read("gemma3_text", stated)
    ours = rope_parameters_by_layer_type(hf, window_theta=hf["rope_local_base_freq"])
    theirs = CONFIG_MAPPING["gemma3_text"](**_copied(stated)).rope_parameters
    for parameters in (*ours.values(), *theirs.values()):
        parameters.pop("type", None)
    assert ours == theirs


def _copied(stated):
    """transformers writes into what it is given."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in stated.items()}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_config_means_the_same_after_transformers_has_saved_it_anew(name):
    raw = TINY_MODELS[name].get("text_config", TINY_MODELS[name])
    saved = CONFIG_MAPPING[raw["model_type"]](**_copied(raw)).to_dict()
    assert parse(raw["model_type"], raw) == parse(raw["model_type"], saved)


def test_the_text_model_is_what_text_config_says():
    """Of what stands around it only tie_word_embeddings is the text model's."""
    family = FAMILIES["Gemma3ForConditionalGeneration"]
    raw = {"model_type": "gemma3", "text_config": {"hidden_size": 64}, "hidden_size": 32, "sliding_window": 8}
    hf = family.hf_config(raw)
    assert (hf["hidden_size"], hf["sliding_window"], hf["tie_word_embeddings"]) == (64, 4096, True)
    assert not family.hf_config(raw | {"tie_word_embeddings": False})["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("model_type", "stated", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True, which is not supported for llama"),
        ("mistral", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", {"is_causal": False}, "is_causal is False, which .* supported is True"),
        ("qwen3", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, .* supported is None"),
        ("llama", {"model_type": "granite"}, "model_type is 'granite'; its architecture needs 'llama'"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 32}, "layer_types have 'chunked_attention'; known: full_"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "3 layer_types and 32 num_hidden_layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 32}, "no sliding window for them"),
        ("gemma3_text", {"sliding_window": None}, "no sliding window for them"),
        ("mistral", {"layer_types": ["full_attention"] * 32}, "sliding_window is 4096 and its layer_types differ"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "have parts"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "those of one rotation"),
        ("llama", {"rope_scaling": {"rope_type": "su"}}, "rope_type 'su' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(model_type, stated, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse(model_type, stated)


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_a_key_that_nobody_has_declared_cannot_be_read(model_type):
    """So that the walks above see every key."""
    with pytest.raises(KeyError):
        read(model_type, {"new_key": 1})["new_key"]


def test_every_layer_that_has_a_window_has_one():
    assert windows_of(["sliding_attention", "full_attention"], 8) == (8, None)
    assert windows_of(["full_attention"], None) == (None,)


ORIGINAL = {"original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("model_type", "stated", "expected"),
    [
        ("llama", {}, 2048),
        ("mistral", {}, 131_072),
        ("qwen2", {}, 32_768),
        ("gemma3_text", {}, 131_072),
        ("llama", {"max_position_embeddings": 4096}, 4096),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 4096}, 16_384),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.5}, "max_position_embeddings": 4096}, 10_240),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 8192),
        ("llama", {"rope_scaling": LLAMA3 | ORIGINAL, "max_position_embeddings": 131_072}, 131_072),
        ("llama", {"rope_scaling": LONGROPE | ORIGINAL, "max_position_embeddings": 131_072}, 131_072),
        ("llama", {"rope_scaling": LONGROPE | ORIGINAL | {"factor": 4.0}, "max_position_embeddings": 65_536}, 65_536),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0} | ORIGINAL, "max_position_embeddings": 40_960},
            32_768,
        ),
        (
            "qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0} | ORIGINAL, "max_position_embeddings": 32_768},
            32_768,
        ),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 40_960}, 163_840),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": None} | ORIGINAL}, 32_768),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}, "max_position_embeddings": 4096}, 4096),
    ],
)
def test_the_models_own_length_is_that_of_vllm(model_type, stated, expected):
    """`_get_and_verify_max_len` there: no factor for llama3, longrope and Gemma 3, which state the length with it."""
    assert model_max_len({"architectures": [ARCHITECTURES[model_type]], **stated}) == expected


def test_a_rotation_does_not_depend_on_the_age_of_the_file():
    old = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    rotations = [parse("llama", stated).rope for stated in (old, new)]
    np.testing.assert_allclose(rotations[0].inv_freq, 500.0 ** (-2 * np.arange(64) / 128) / 4)
    assert rotations[0] == rotations[1]
