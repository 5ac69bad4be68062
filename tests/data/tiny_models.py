"""Tiny checkpoints of every model family: config.json as in real repositories, at toy size, seeded weights.

`write_tiny_model(name, folder)` needs neither torch nor the network and takes milliseconds, so each test
writes the model it needs. What transformers computes from the same files is in `tiny_goldens/<name>.npz`,
made by make_goldens.py (again after any change to a config or to the drawing of weights).

D=64 mostly, L=3 to 6, V=256. Lengths are such that 60-token prompts feel what the config asks for: windows of
8, RoPE scaled from contexts of 32 or 48 tokens. In float32, correct logits agree to about 3e-5; the smallest
effects of a mistake (GELU without tanh, eps of 1e-6 for 1e-5) are about 2e-3, most are above 1.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

LLAMA: Config = {  # the keys of Llama-2-7b-hf
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 256,
}

LLAMA3: Config = LLAMA | {  # the keys of Llama-3.2-1B-Instruct
    "eos_token_id": [2, 8, 9],
    "head_dim": 16,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 48,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

GEMMA3: Config = {  # the keys of gemma-3-270m
    "_sliding_window_pattern": 2,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 128,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0.dev0",
    "use_bidirectional_attention": False,
    "use_cache": True,
    "vocab_size": 256,
}


def _new_form(config: Config, rope_parameters: Config, **changes: Any) -> Config:
    """`config` as transformers 5 saves it: all of RoPE in `rope_parameters`, `dtype` for `torch_dtype`."""
    old = ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype", "_sliding_window_pattern")
    kept = {key: value for key, value in config.items() if key not in old}
    changes = {"dtype": config["torch_dtype"], "transformers_version": "5.0.0", **changes}
    return kept | {"rope_parameters": rope_parameters} | changes


TINY_MODELS: dict[str, Config] = {
    "llama": LLAMA,
    "llama3_rope": LLAMA3,
    "llama3_rope_parameters": _new_form(LLAMA3, LLAMA3["rope_scaling"] | {"rope_theta": 500000.0}),
    "llama_linear_rope": LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "torch_dtype": "float16"},
    # Plain RoPE up to 48 tokens; beyond, where only the 60-token prompt is, the base grows with the sequence.
    "llama_dynamic_rope": LLAMA | {"max_position_embeddings": 48, "rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "llama_yarn": LLAMA
    | {
        "rope_scaling": {
            "beta_fast": 2.0,  # the defaults, 32 and 1, would leave no frequency of so short a context alone
            "beta_slow": 0.25,
            "factor": 4.0,
            "original_max_position_embeddings": 48,
            "rope_type": "yarn",
        }
    },
    # Short factors up to 48 tokens, long ones beyond; no prompt crosses the border while it is continued.
    "llama_longrope": LLAMA
    | {
        "rope_scaling": {
            "long_factor": [1.0, 1.1, 1.5, 2.5, 4.0, 6.0, 9.0, 12.0],
            "original_max_position_embeddings": 48,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.0, 1.05, 1.2, 1.3, 1.4, 1.5, 1.6],
        }
    },
    "mistral": {  # the keys of Mistral-7B-v0.1, with the explicit head_dim of Mistral-Nemo
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "max_position_embeddings": 128,
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 256,
    },
    "smollm2": LLAMA  # the keys of SmolLM2-135M-Instruct
    | {
        "hidden_size": 72,
        "is_llama_config": True,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "qwen2": {  # the keys of Qwen2.5-0.5B-Instruct: a sliding window is given, and not used
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "max_position_embeddings": 128,
        "max_window_layers": 1,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 256,
    },
    "qwen3": {  # the keys of Qwen3-0.6B, with YaRN as its model card tells to add it
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "max_position_embeddings": 128,
        "max_window_layers": 3,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn"},
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 256,
    },
    "gemma3": GEMMA3,
    # transformers honours final_logit_softcapping here; attn_logit_softcapping it reads and never applies.
    "gemma3_softcap": _new_form(
        GEMMA3,
        {
            "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        final_logit_softcapping=10.0,
        hidden_size=96,  # its root, the scale of the embeddings, is not exact in bfloat16
    ),
    # The shape of gemma-3-4b-it: the text model nested, most of its settings left to the defaults of
    # Gemma3TextConfig (8/4 heads of 256, one global layer in six, tied embeddings, eps, RoPE bases).
    "gemma3_multimodal": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 250,
        "eoi_token_index": 251,
        "eos_token_id": [1, 106],
        "image_token_index": 252,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 160,
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 8,
            "vocab_size": 256,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 32,
            "image_size": 28,
            "intermediate_size": 48,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
}


GEMMA3_TEXT_DEFAULTS: Config = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


def write_tiny_model(name: str, folder: Path) -> Path:
    """Writes config.json and model.safetensors of `TINY_MODELS[name]` into `folder` (made if absent)."""
    config = TINY_MODELS[name]
    dtype = DTYPES[config.get("torch_dtype") or config["dtype"]]
    # RandomState and not default_rng: numpy promises the stream of the former for good (NEP 19).
    random = np.random.RandomState(crc32(name.encode()))
    tensors = {key: _draw(random, key, shape, config).astype(dtype) for key, shape in _shapes(config)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors in the checkpoint; a matrix is [out, in]."""
    prefix, text = "model.", config
    if "text_config" in config:
        prefix, text = "language_model.model.", GEMMA3_TEXT_DEFAULTS | config["text_config"]
        vision_size = config["vision_config"]["hidden_size"]
        yield "multi_modal_projector.mm_soft_emb_norm.weight", (vision_size,)
        yield "vision_tower.vision_model.post_layernorm.weight", (vision_size,)
    family = text["model_type"]
    D, F, V = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    N, K = text["num_attention_heads"], text["num_key_value_heads"]
    H = text.get("head_dim", D // N)

    yield f"{prefix}embed_tokens.weight", (V, D)
    for index in range(text["num_hidden_layers"]):
        layer = f"{prefix}layers.{index}."
        for projection, heads in (("q_proj", N), ("k_proj", K), ("v_proj", K)):
            yield f"{layer}self_attn.{projection}.weight", (heads * H, D)
            if family == "qwen2":
                yield f"{layer}self_attn.{projection}.bias", (heads * H,)
        yield f"{layer}self_attn.o_proj.weight", (D, N * H)
        if family in ("qwen3", "gemma3_text"):
            yield f"{layer}self_attn.q_norm.weight", (H,)
            yield f"{layer}self_attn.k_norm.weight", (H,)
        yield f"{layer}mlp.gate_proj.weight", (F, D)
        yield f"{layer}mlp.up_proj.weight", (F, D)
        yield f"{layer}mlp.down_proj.weight", (D, F)
        yield f"{layer}input_layernorm.weight", (D,)
        yield f"{layer}post_attention_layernorm.weight", (D,)
        if family == "gemma3_text":
            yield f"{layer}pre_feedforward_layernorm.weight", (D,)
            yield f"{layer}post_feedforward_layernorm.weight", (D,)
    yield f"{prefix}norm.weight", (D,)
    if not text.get("tie_word_embeddings", family == "gemma3_text"):
        yield "lm_head.weight", (V, D)


def _draw(random: np.random.RandomState, name: str, shape: tuple[int, ...], config: Config) -> np.ndarray:
    """Weights (float64) that make each part matter: peaked attention, uneven norms, logits of std 3."""
    values = random.standard_normal(shape)
    gemma = config["model_type"].startswith("gemma3")  # its norms multiply by 1 + weight
    if name.endswith("norm.weight"):
        gemma_mean = 6.0 if name.endswith("model.norm.weight") else 1.0 if ".post_" in name else 0.0
        return (gemma_mean if gemma else 1.0) + 0.3 * values
    if name.endswith("bias"):
        return 0.5 * values
    if "embed_tokens" in name:  # Gemma multiplies them by sqrt(D)
        return (0.05 if gemma else 0.4) * values
    gain = 1.4 if "q_proj" in name or "k_proj" in name else 3.0 if "lm_head" in name else 2.0
    return gain / np.sqrt(shape[1]) * values
