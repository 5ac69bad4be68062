"""Llama (Touvron et al., arXiv 2307.09288) and the models of its shape: Mistral, SmolLM2, Qwen2 and Qwen3.

They differ by what their config says: biases on Q, K and V (Qwen2), a norm on each query and key head (Qwen3), a
sliding window in some layers (Mistral 7B v0.1, some Qwen2).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import Attention, AttentionConfig, StepMetadata
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.kv_caches import KVCaches, LayerCache
from jaxllm.layers.mlp import GatedMLP, check_activation
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RopeConfig, Rotation, make_rope
from jaxllm.models.weight_table import WeightTable, same, transposed


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    model_dim: int
    ff_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # One per layer.

    @classmethod
    def from_hf(cls, hf: dict[str, Any], max_model_len: int) -> "LlamaConfig":
        """From a config.json. Raises UnsupportedModelError for what these layers do not compute."""
        model_type = hf["model_type"]
        if hf.get("mlp_bias") or (hf.get("attention_bias") and model_type != "qwen2"):
            raise UnsupportedModelError(
                f"this {model_type} model has biases on its MLP or attention output (mlp_bias, attention_bias), "
                "which are not supported; the only supported biases are those of Qwen2 on Q, K and V"
            )
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        return cls(
            vocab_size=hf["vocab_size"],
            model_dim=hf["hidden_size"],
            ff_dim=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=head_dim,
            activation=check_activation(hf.get("hidden_act", "silu")),
            norm_eps=hf["rms_norm_eps"],
            rope=make_rope(hf, head_dim, max_model_len),
            tie_embeddings=hf.get("tie_word_embeddings", False),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            sliding_windows=_sliding_windows(hf),
        )


def _sliding_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Mistral's window holds for every layer; Qwen's for those that `layer_types` or `max_window_layers` name."""
    num_layers, window = hf["num_hidden_layers"], hf.get("sliding_window")
    if not window or hf.get("use_sliding_window") is False or hf["model_type"] == "llama":
        return (None,) * num_layers
    if hf.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in hf["layer_types"])
    first = hf.get("max_window_layers", 0) if hf["model_type"].startswith("qwen") else 0
    return tuple(window if i >= first else None for i in range(num_layers))


class LlamaLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, index: int, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.attention = Attention(
            AttentionConfig(
                model_dim=config.model_dim,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                sm_scale=config.head_dim**-0.5,
                qkv_bias=config.qkv_bias,
                qk_norm_eps=config.norm_eps if config.qk_norm else None,
                sliding_window=config.sliding_windows[index],
            ),
            dtype,
        )
        self.mlp_norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.mlp = GatedMLP(config.model_dim, config.ff_dim, config.activation, dtype)

    def __call__(
        self, x_TD: Array, rotation: Rotation, cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Array, LayerCache]:
        attention_TD, cache = self.attention(self.attention_norm(x_TD), rotation, cache, metadata)
        x_TD = x_TD + attention_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), cache


class Llama(nnx.Module):
    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, activation_dtype: jnp.dtype):
        self.config = config
        self.activation_dtype = activation_dtype
        self.embedding = Embedding(config.vocab_size, config.model_dim, dtype)
        self.layers = nnx.List([LlamaLayer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.model_dim, dtype)

    def __call__(self, token_ids_T: Array, caches: KVCaches, metadata: StepMetadata) -> Array:
        """Hidden states [T, D] before the last norm. The caches then have this step's K and V."""
        x_TD = self.embedding(token_ids_T, self.activation_dtype)
        rotation = self.config.rope.rotation(metadata.positions_T)
        for i, layer in enumerate(self.layers):
            x_TD, caches[i] = layer(x_TD, rotation, caches[i], metadata)
        return x_TD

    def logits(self, x_SD: Array) -> Array:
        """float32 [S, V] of the rows that need them."""
        return (self.head or self.embedding).logits(self.norm(x_SD))


def weight_table(config: LlamaConfig) -> WeightTable:
    table = {"embedding.weight": same("model.embed_tokens.weight"), "norm.weight": same("model.norm.weight")}
    if not config.tie_embeddings:
        table["head.weight"] = same("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table |= {
            f"{ours}.attention_norm.weight": same(f"{theirs}.input_layernorm.weight"),
            f"{ours}.attention.q.weight": transposed(f"{theirs}.self_attn.q_proj.weight"),
            f"{ours}.attention.k.weight": transposed(f"{theirs}.self_attn.k_proj.weight"),
            f"{ours}.attention.v.weight": transposed(f"{theirs}.self_attn.v_proj.weight"),
            f"{ours}.attention.out.weight": transposed(f"{theirs}.self_attn.o_proj.weight"),
            f"{ours}.mlp_norm.weight": same(f"{theirs}.post_attention_layernorm.weight"),
            f"{ours}.mlp.gate.weight": transposed(f"{theirs}.mlp.gate_proj.weight"),
            f"{ours}.mlp.up.weight": transposed(f"{theirs}.mlp.up_proj.weight"),
            f"{ours}.mlp.down.weight": transposed(f"{theirs}.mlp.down_proj.weight"),
        }
        if config.qkv_bias:
            for x in "qkv":
                table[f"{ours}.attention.{x}.bias"] = same(f"{theirs}.self_attn.{x}_proj.bias")
        if config.qk_norm:
            table[f"{ours}.attention.q_norm.weight"] = same(f"{theirs}.self_attn.q_norm.weight")
            table[f"{ours}.attention.k_norm.weight"] = same(f"{theirs}.self_attn.k_norm.weight")
    return table
