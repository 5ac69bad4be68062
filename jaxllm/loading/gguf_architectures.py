"""What llama.cpp knows of each architecture without being told by a GGUF file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.errors import UnsupportedModelError
from jaxllm.loading.gguf_fields import GGUFFields
from jaxllm.loading.gguf_names import LAYER_NAMES, PRE_NORM_NAMES, QK_NORM_NAMES, SANDWICH_NORM_NAMES

ROPE_FACTORS = "rope_freqs.weight"
GEMMA3_LOCAL_ROPE_THETA = 10_000.0
GEMMA3_SLIDING_WINDOW_PATTERN = 6
GEMMA3_27B_NUM_LAYERS = 62

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One `general.architecture`.

    model_type, model_class: of Hugging Face.
    layer_names: of the parts of a layer: the file's, and Hugging Face's.
    config: from the file's fields to what its config.json has beyond, or instead of, what all architectures have.
    restored: undoes what llama.cpp's conversion did to a tensor, by its Hugging Face name; takes the config too.
    has_rope_factors: whether a tensor ROPE_FACTORS is a part of the config.
    """

    model_type: str
    model_class: str
    layer_names: Mapping[str, str]
    config: Callable[[GGUFFields, int], Config]
    restored: Callable[[str, np.ndarray, Config], np.ndarray] = lambda name, array, config: array
    has_rope_factors: bool = False


def _llama(fields: GGUFFields, head_dim: int) -> Config:
    window = fields.optional("attention.sliding_window")
    if not window:
        return {}
    # llama.cpp has one name for both families.
    return {"sliding_window": window, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def _restored_llama(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    for projection, num_heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".self_attn.{projection}." in name:
            return split_rotary_halves(array, config[num_heads])
    return array


def split_rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of Q or K ordered for rotating neighbours (2i, 2i+1) into rows for rotating halves (i, i + H/2).

    llama.cpp's Llama rotates neighbours, Hugging Face's rotates halves.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _qwen(fields: GGUFFields, head_dim: int) -> Config:
    if window := fields.optional("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{fields.file.path} has attention.sliding_window = {window}, which llama.cpp does not know of "
            f"{fields.architecture} models; convert it again without one."
        )
    return {}


def _gemma3(fields: GGUFFields, head_dim: int) -> Config:
    is_27b = fields.integer("block_count") == GEMMA3_27B_NUM_LAYERS
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            fields.integer("embedding_length") // fields.integer("attention.head_count") if is_27b else head_dim
        ),
        "rope_local_base_freq": fields.optional("rope.freq_base_swa") or GEMMA3_LOCAL_ROPE_THETA,
        "sliding_window": fields.optional("attention.sliding_window"),
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", GEMMA3_SLIDING_WINDOW_PATTERN),
        "attn_logit_softcapping": fields.optional("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional("final_logit_softcapping"),
    }


def _restored_gemma3(name: str, array: np.ndarray, config: Config) -> np.ndarray:
    """Norms are stored as the factor 1 + w that Gemma's RMSNorm applies."""
    return array - 1 if name.endswith("norm.weight") else array


ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        model_class="LlamaForCausalLM",
        layer_names=LAYER_NAMES | PRE_NORM_NAMES,
        config=_llama,
        restored=_restored_llama,
        has_rope_factors=True,
    ),
    "qwen2": Architecture(
        model_type="qwen2",
        model_class="Qwen2ForCausalLM",
        layer_names=LAYER_NAMES | PRE_NORM_NAMES,
        config=_qwen,
    ),
    "qwen3": Architecture(
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        layer_names=LAYER_NAMES | PRE_NORM_NAMES | QK_NORM_NAMES,
        config=_qwen,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        layer_names=LAYER_NAMES | SANDWICH_NORM_NAMES | QK_NORM_NAMES,
        config=_gemma3,
        restored=_restored_gemma3,
    ),
}
