"""Llama (Touvron et al., arXiv 2307.09288) and the models of its shape: Mistral, SmolLM2, Qwen2 and Qwen3.

They differ by what their config says: biases on Q, K and V (Qwen2), a norm on each query and key head (Qwen3), a
sliding window in some layers (Mistral 7B v0.1, some Qwen2).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import Attention, AttentionConfig
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.kv_caches import KVCaches, LayerCache
from jaxllm.layers.mlp import GatedMLP, check_activation
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RopeConfig, Rotation, make_rope
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.layers.weight_format import WeightFormats
from jaxllm.models.family import Family
from jaxllm.models.hf_config import NEUTRAL, ConfigKeys, HFConfig, windows_of
from jaxllm.models.rope_parameters import ROPE_DEFAULTS, extended_len, rope_parameters
from jaxllm.models.weight_table import WeightTable, projection, same

_DEFAULTS = ROPE_DEFAULTS | {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # As many as query heads.
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "original_max_position_embeddings": None,
}
_QWEN_DEFAULTS = _DEFAULTS | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
LLAMA = ConfigKeys("llama", _DEFAULTS, NEUTRAL)
MISTRAL = ConfigKeys(
    "mistral",
    _DEFAULTS
    | {
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "layer_types": None,
    },
    NEUTRAL,
)
# Qwen2 has biases on Q, K and V, whatever attention_bias says.
QWEN2 = ConfigKeys("qwen2", _QWEN_DEFAULTS, {key: NEUTRAL[key] for key in NEUTRAL if key != "attention_bias"})
QWEN3 = ConfigKeys("qwen3", _QWEN_DEFAULTS | {"head_dim": 128}, NEUTRAL)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    model_dim: int
    ff_dim: int
    num_layers: int
    num_heads: int
    cache_specs: tuple[CacheSpec, ...]  # One per layer.
    activation: str
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf: HFConfig, max_model_len: int) -> "LlamaConfig":
        """Raises UnsupportedModelError for what these layers do not compute."""
        head_dim = hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
        num_kv_heads = hf["num_key_value_heads"] or hf["num_attention_heads"]
        rope = make_rope(
            rope_parameters(hf),
            head_dim,
            max_position_embeddings=hf["max_position_embeddings"],
            max_model_len=max_model_len,
        )
        return cls(
            vocab_size=hf["vocab_size"],
            model_dim=hf["hidden_size"],
            ff_dim=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            cache_specs=tuple(
                CacheSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=window)
                for window in _sliding_windows(hf)
            ),
            activation=check_activation(hf["hidden_act"]),
            norm_eps=hf["rms_norm_eps"],
            rope=rope,
            tie_embeddings=bool(hf["tie_word_embeddings"]),
            qkv_bias=hf.model_type == "qwen2",
            qk_norm=hf.model_type == "qwen3",
        )


def max_len(hf: HFConfig) -> int:
    """The most tokens that the model was made for."""
    return extended_len(hf["max_position_embeddings"], rope_parameters(hf))


def _sliding_windows(hf: HFConfig) -> tuple[int | None, ...]:
    num_layers = hf["num_hidden_layers"]
    match hf.model_type:
        case "llama":
            return (None,) * num_layers
        case "mistral":  # All layers alike.
            window = hf["sliding_window"]
            layer_types = ["sliding_attention" if window else "full_attention"] * num_layers
            if hf.layer_types(layer_types) != layer_types:
                raise UnsupportedModelError(
                    f"the config's sliding_window is {window} and its layer_types differ: the layers of mistral "
                    "models are alike"
                )
        case _:
            window = hf["sliding_window"] if hf["use_sliding_window"] else None
            first = hf["max_window_layers"] if window else num_layers
            layer_types = hf.layer_types(
                ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
            )
    return windows_of(layer_types, window)


class LlamaLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, index: int, formats: WeightFormats):
        cache = config.cache_specs[index]
        self.attention_norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.attention = Attention(
            AttentionConfig(
                model_dim=config.model_dim,
                num_heads=config.num_heads,
                cache=cache,
                sm_scale=cache.head_dim**-0.5,
                qkv_bias=config.qkv_bias,
                qk_norm_eps=config.norm_eps if config.qk_norm else None,
            ),
            formats.under("attention"),
        )
        self.mlp_norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.mlp = GatedMLP(config.model_dim, config.ff_dim, config.activation, formats.under("mlp"))

    def __call__(
        self, x_TD: Array, rotation: Rotation, cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Array, LayerCache]:
        attention_TD, cache = self.attention(self.attention_norm(x_TD), rotation, cache, metadata)
        x_TD = x_TD + attention_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD), metadata), cache


class Llama(nnx.Module):
    """A `LanguageModel`."""

    def __init__(self, config: LlamaConfig, formats: WeightFormats, activation_dtype: jnp.dtype):
        self.config = config
        self.activation_dtype = activation_dtype
        self.embedding = Embedding(config.vocab_size, config.model_dim, formats.dtype)
        self.layers = nnx.List([LlamaLayer(config, i, formats.under(f"layers.{i}")) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.model_dim, formats.dtype)

    def embed(self, token_ids_T: Array) -> Array:
        return self.embedding(token_ids_T, self.activation_dtype)

    def __call__(self, x_TD: Array, caches: KVCaches, metadata: StepMetadata) -> Array:
        rotation = self.config.rope.rotation(metadata.positions_T)
        for i, layer in enumerate(self.layers):
            x_TD, caches[i] = layer(x_TD, rotation, caches[i], metadata)
        return x_TD

    def logits(self, x_SD: Array) -> Array:
        return (self.head or self.embedding).logits(self.norm(x_SD))


def weight_table(config: LlamaConfig) -> WeightTable:
    table: WeightTable = {
        "embedding.weight": same("model.embed_tokens.weight"),
        "norm.weight": same("model.norm.weight"),
    }
    if not config.tie_embeddings:
        table["head.weight"] = same("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table |= {
            f"{ours}.attention_norm.weight": same(f"{theirs}.input_layernorm.weight"),
            f"{ours}.attention.q": projection(f"{theirs}.self_attn.q_proj"),
            f"{ours}.attention.k": projection(f"{theirs}.self_attn.k_proj"),
            f"{ours}.attention.v": projection(f"{theirs}.self_attn.v_proj"),
            f"{ours}.attention.out": projection(f"{theirs}.self_attn.o_proj"),
            f"{ours}.mlp_norm.weight": same(f"{theirs}.post_attention_layernorm.weight"),
            f"{ours}.mlp.gate": projection(f"{theirs}.mlp.gate_proj"),
            f"{ours}.mlp.up": projection(f"{theirs}.mlp.up_proj"),
            f"{ours}.mlp.down": projection(f"{theirs}.mlp.down_proj"),
        }
        if config.qkv_bias:
            for x in "qkv":
                table[f"{ours}.attention.{x}.bias"] = same(f"{theirs}.self_attn.{x}_proj.bias")
        if config.qk_norm:
            table[f"{ours}.attention.q_norm.weight"] = same(f"{theirs}.self_attn.q_norm.weight")
            table[f"{ours}.attention.k_norm.weight"] = same(f"{theirs}.self_attn.k_norm.weight")
    return table


def _family(keys: ConfigKeys) -> Family:
    return Family(keys, LlamaConfig.from_hf, max_len, Llama, weight_table)


FAMILIES = {
    "LlamaForCausalLM": _family(LLAMA),
    "MistralForCausalLM": _family(MISTRAL),
    "Qwen2ForCausalLM": _family(QWEN2),
    "Qwen3ForCausalLM": _family(QWEN3),
}
