"""A GGUF file reads as the Hugging Face checkpoint that it was made from."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import CorruptCheckpointError, UnsupportedModelError
from jaxllm.loading.gguf import GGUFCheckpoint
from jaxllm.loading.gguf_architectures import ARCHITECTURES
from jaxllm.loading.gguf_fields import WITHOUT_EFFECT
from jaxllm.loading.gguf_file import GGUFFile
from jaxllm.loading.gguf_names import huggingface_name

D, F, N, K, H, V = 64, 96, 4, 2, 16, 128


def write_gguf(path, tensors, architecture="llama", metadata=None, tensor_types=None):
    """By the gguf package. `metadata` without the prefix of the architecture; None removes a default."""
    writer = gguf.GGUFWriter(path, architecture)
    defaults = {
        "context_length": 512,
        "embedding_length": D,
        "block_count": 1,
        "feed_forward_length": F,
        "attention.head_count": N,
        "attention.head_count_kv": K,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500_000.0,
    }
    for name, value in (defaults | (metadata or {})).items():
        key = name if name.startswith(("tokenizer.", "split.", "general.")) else f"{architecture}.{name}"
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        tensor_type = (tensor_types or {}).get(name)
        data = array if tensor_type is None else gguf.quants.quantize(array, tensor_type)
        writer.add_tensor(name, data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def draw(*shape):
    return np.random.RandomState(sum(shape)).standard_normal(shape).astype(np.float32)


def test_tensors_and_metadata_are_those_of_the_gguf_reader(tmp_path):
    types = {
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.attn_v.weight": gguf.GGMLQuantizationType.F16,
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.BF16,
    }
    tensors = {name: draw(V, D) for name in types} | {"output_norm.weight": draw(D)}
    metadata = {
        "tokenizer.ggml.tokens": ["a", "ł", "日本", ""],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.0, 0.25],
        "tokenizer.ggml.token_type": [1, 1, 3, 4],
        "general.name": "näme",
    }
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata, tensor_types=types)

    file = GGUFFile(path)
    reader = gguf.GGUFReader(path)

    assert file.tensors.keys() == tensors.keys()
    for tensor in reader.tensors:
        stored = file.read(tensor.name)
        assert stored.shape == tensors[tensor.name].shape
        assert stored.ctypes.data % 64 == 0
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(stored.astype(np.float32), expected)
    assert file.read("blk.0.attn_v.weight").dtype == np.float16
    assert file.read("blk.0.ffn_up.weight").dtype == ml_dtypes.bfloat16
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = file.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_names_invert_those_of_the_conversion(architecture):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    if architecture in ("qwen3", "gemma3"):
        layer += ["self_attn.q_norm", "self_attn.k_norm"]
    if architecture == "gemma3":
        layer += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    hf_names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    hf_names += [f"model.layers.1.{name}.weight" for name in layer] + ["model.layers.0.self_attn.k_proj.bias"]

    for hf_name in hf_names:
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert huggingface_name(gguf_name, ARCHITECTURES[architecture].layer_names) == hf_name


def test_rotary_order_of_llama_is_restored(tmp_path):
    q, k, q_bias = draw(N * H, D), draw(K * H, D), draw(N * H)

    def interleave(weight, num_heads):  # as llama.cpp's conversion does
        halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))

    tensors = {
        "token_embd.weight": draw(V, D),
        "blk.0.attn_q.weight": interleave(q, N),
        "blk.0.attn_k.weight": interleave(k, K),
        "blk.0.attn_q.bias": interleave(q_bias, N),
    }
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "llama.gguf", tensors))
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight"), q)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.k_proj.weight"), k)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), q_bias)
    assert checkpoint.config["attention_bias"]

    tensors["blk.0.attn_q.weight"] = q
    unchanged = GGUFCheckpoint(write_gguf(tmp_path / "qwen.gguf", tensors, architecture="qwen2"))
    np.testing.assert_array_equal(unchanged.read("model.layers.0.self_attn.q_proj.weight"), q)


def test_norms_of_gemma_are_restored(tmp_path):
    norm = draw(D)
    tensors = {"token_embd.weight": draw(V, D), "output_norm.weight": norm, "blk.0.attn_q_norm.weight": norm}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, architecture="gemma3"))
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), norm - 1)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_norm.weight"), norm - 1)
    assert checkpoint.read("model.embed_tokens.weight")[3, 5] == tensors["token_embd.weight"][3, 5]


def test_config_has_the_names_of_hugging_face(tmp_path):
    tensors = {"token_embd.weight": draw(V, D), "output.weight": draw(V, D)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors, metadata={"vocab_size": 999}))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,  # the tensor decides
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "max_position_embeddings": 512,
        "rope_theta": 500_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    assert expected.items() <= checkpoint.config.items()
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert checkpoint.tensor_shape("lm_head.weight") == (V, D)
    assert checkpoint.nbytes == 2 * V * D * 4


def test_config_of_gemma_states_what_its_files_leave_out(tmp_path):
    metadata = {"attention.key_length": 32, "attention.sliding_window": 512, "final_logit_softcapping": 30.0}
    tensors = {"token_embd.weight": draw(V, D)}
    path = write_gguf(tmp_path / "m.gguf", tensors, architecture="gemma3", metadata=metadata)
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": True,
    }
    assert expected.items() <= GGUFCheckpoint(path).config.items()


def test_rotary_factors_become_part_of_the_config(tmp_path):
    factors = np.linspace(1, 8, H // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D), "rope_freqs.weight": factors})
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert checkpoint.tensor_names() == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.original_context_length": 128}, None),
        ({"rope.scaling.type": "none", "rope.scaling.original_context_length": 128}, None),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_a_scaling_without_a_type_is_linear_as_in_llama_cpp(tmp_path, fields, expected):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, metadata=fields)
    assert GGUFCheckpoint(path).config["rope_scaling"] == expected


ODD_VALUES = {"rope.scaling.type": "longrope", "attention.head_count": 2, "attention.causal": 0}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_is_used_or_refused_or_without_effect(tmp_path, architecture):
    """Those that the gguf package knows."""

    def config(**fields):
        path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, architecture, fields)
        return GGUFCheckpoint(path).config

    classes = [value for value in vars(gguf.Keys).values() if isinstance(value, type)]
    keys = [key for of in classes for key in vars(of).values() if isinstance(key, str)]
    names = [key.removeprefix("{arch}.") for key in keys if key.startswith("{arch}.")]
    assert len(names) > 100
    plain = config()
    for name in [*names, "something.new"]:
        is_used, refusal = False, ""
        try:
            is_used = config(**{name: ODD_VALUES.get(name, 7)}) != plain
        except UnsupportedModelError as error:
            refusal = str(error)
        said = {"rope.dimension_count": "rotates 7", "rope.scaling.type": "'longrope'"}.get(name, name)
        # It has an effect with yarn only, which the tests beside this one show.
        is_known = name in WITHOUT_EFFECT or name == "rope.scaling.original_context_length"
        assert is_used or said in refusal or is_known, (name, refusal)


def test_rotary_scaling_is_told_in_hugging_face_terms(tmp_path):
    """Values that ask for nothing more, as converters write them, do no harm."""
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, "qwen3", metadata)
    assert GGUFCheckpoint(path).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }


def test_every_end_of_turn_token_ends_generation(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|end_of_text|>", "<|eot_id|>", "b", "<|eom_id|>", "c"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.bos_token_id": 0,
    }
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, metadata=metadata)
    generation_config = GGUFCheckpoint(path).generation_config
    assert generation_config["eos_token_id"] == [1, 2, 4, 5]
    assert generation_config["bos_token_id"] == 0


def test_ids_outside_the_vocabulary_are_no_special_tokens(tmp_path):
    """As in files whose converter stored -1."""
    ids = {f"tokenizer.ggml.{name}_token_id": 2**32 - 1 for name in ("bos", "eot", "padding")}
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1} | ids
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, metadata=metadata)
    generation_config = GGUFCheckpoint(path).generation_config
    assert generation_config == {"bos_token_id": None, "eos_token_id": [1], "pad_token_id": None}


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensors", "message"),
    [
        ("mamba", {}, (), "architecture 'mamba'; this version knows llama, qwen2, qwen3, gemma3"),
        ("llama", {}, ("blk.0.ffn_gate_inp.weight",), "has a tensor blk.0.ffn_gate_inp.weight"),
        ("qwen3", {}, ("rope_freqs.weight",), "has a tensor rope_freqs.weight"),
        ("llama", {"rope.dimension_count": 8}, (), "rotates 8 of a head's 16 dimensions"),
        ("llama", {"rope.scaling.type": "longrope"}, (), "'longrope'"),
        ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0}, (), "attn_factor"),
        ("llama", {"attention.head_count_kv": [1, 2]}, (), "one number for all layers"),
        ("llama", {"split.count": 3}, (), "one of 3 parts; merge them"),
    ],
)
def test_unknown_features_are_refused(tmp_path, architecture, metadata, tensors, message):
    arrays = {name: draw(V, D) for name in ("token_embd.weight", *tensors)}
    path = write_gguf(tmp_path / "m.gguf", arrays, architecture, metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        GGUFCheckpoint(path)


def test_unknown_tensor_type_is_refused_by_name(tmp_path):
    types = {"x": gguf.GGMLQuantizationType.TQ2_0}
    path = write_gguf(tmp_path / "m.gguf", {"x": draw(2, 256)}, tensor_types=types)
    with pytest.raises(UnsupportedModelError, match=r"tensor x .* of type TQ2_0; this version reads F32"):
        GGUFFile(path)


def test_missing_metadata_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, metadata={"block_count": None})
    with pytest.raises(CorruptCheckpointError, match=r"lacks the metadata llama\.block_count"):
        GGUFCheckpoint(path)


def test_truncated_file_tells_how_many_bytes_are_missing(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(CorruptCheckpointError, match=rf"{len(whole):,} bytes, {len(whole) - 1000:,} are present"):
        GGUFFile(path)


def test_header_cut_anywhere_is_an_error_of_ours(tmp_path):
    metadata = {"tokenizer.ggml.tokens": ["abc", "日本"], "tokenizer.ggml.token_type": [1, 1]}
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": draw(V, D)}, metadata=metadata)
    whole = path.read_bytes()
    for size in range(0, len(whole) - V * D * 4, 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpointError, match=r"GGUF|truncated"):
            GGUFFile(path)
    path.write_bytes(whole[:4] + b"\0\0\0\3" + whole[8:])
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        GGUFFile(path)
