"""Gemma 3, text (Gemma Team, arXiv 2503.19786): local and global layers, QK-norm, norms around each block."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
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
class Gemma3Config:
    vocab_size: int
    model_dim: int
    ff_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    sm_scale: float
    global_rope: RopeConfig
    local_rope: RopeConfig
    tie_embeddings: bool
    attention_soft_cap: float | None
    logits_soft_cap: float | None
    sliding_windows: tuple[int | None, ...]  # One per layer; None for the global ones.

    @classmethod
    def from_hf(cls, hf: dict[str, Any], max_model_len: int) -> "Gemma3Config":
        """From a config.json, of the text model alone or of the multimodal one around it."""
        hf = {**hf, **hf.get("text_config", {})}
        if hf.get("attention_bias") or hf.get("use_bidirectional_attention"):
            raise UnsupportedModelError(
                "this Gemma 3 model has attention_bias or use_bidirectional_attention set, which are not supported"
            )
        head_dim, num_layers = hf.get("head_dim", 256), hf["num_hidden_layers"]
        pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
        kinds = hf.get("layer_types") or [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)
        ]
        by_kind = hf.get("rope_parameters") or {}
        if "full_attention" in by_kind:
            global_rope, local_rope = (
                make_rope({**hf, "rope_parameters": by_kind[kind]}, head_dim, max_model_len)
                for kind in ("full_attention", "sliding_attention")
            )
        else:
            defaults = {"rope_theta": 1_000_000.0, **hf}
            global_rope = make_rope(defaults, head_dim, max_model_len)
            local_rope = make_rope(hf, head_dim, max_model_len, theta=hf.get("rope_local_base_freq", 10_000.0))
        return cls(
            vocab_size=hf.get("vocab_size", 262_208),
            model_dim=hf["hidden_size"],
            ff_dim=hf["intermediate_size"],
            num_layers=num_layers,
            num_heads=hf.get("num_attention_heads", 8),
            num_kv_heads=hf.get("num_key_value_heads", 4),
            head_dim=head_dim,
            activation=check_activation(hf.get("hidden_activation", "gelu_pytorch_tanh")),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            sm_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            global_rope=global_rope,
            local_rope=local_rope,
            tie_embeddings=hf.get("tie_word_embeddings", True),
            attention_soft_cap=hf.get("attn_logit_softcapping"),
            logits_soft_cap=hf.get("final_logit_softcapping"),
            sliding_windows=tuple(
                hf.get("sliding_window", 4096) if kind == "sliding_attention" else None for kind in kinds
            ),
        )


class Gemma3Layer(nnx.Module):
    def __init__(self, config: Gemma3Config, index: int, dtype: jnp.dtype):
        def norm() -> RMSNorm:
            return RMSNorm(config.model_dim, eps=config.norm_eps, unit_offset=True)

        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Attention(
            AttentionConfig(
                model_dim=config.model_dim,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                sm_scale=config.sm_scale,
                qk_norm_eps=config.norm_eps,
                unit_offset_norm=True,
                sliding_window=config.sliding_windows[index],
                soft_cap=config.attention_soft_cap,
            ),
            dtype,
        )
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = GatedMLP(config.model_dim, config.ff_dim, config.activation, dtype)

    def __call__(
        self, x_TD: Array, rotation: Rotation, cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Array, LayerCache]:
        attention_TD, cache = self.attention(self.attention_norm(x_TD), rotation, cache, metadata)
        x_TD = x_TD + self.attention_out_norm(attention_TD)
        return x_TD + self.mlp_out_norm(self.mlp(self.mlp_norm(x_TD))), cache


class Gemma3(nnx.Module):
    def __init__(self, config: Gemma3Config, dtype: jnp.dtype, activation_dtype: jnp.dtype):
        self.config = config
        self.activation_dtype = activation_dtype
        # The factor is rounded to the weights' dtype, as in training.
        self.embedding_scale = float(np.sqrt(config.model_dim).astype(dtype))
        self.embedding = Embedding(config.vocab_size, config.model_dim, dtype)
        self.layers = nnx.List([Gemma3Layer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps, unit_offset=True)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.model_dim, dtype)

    def __call__(self, token_ids_T: Array, caches: KVCaches, metadata: StepMetadata) -> Array:
        """Hidden states [T, D] before the last norm. The caches then have this step's K and V."""
        x_TD = self.embedding(token_ids_T, self.activation_dtype)
        x_TD *= jnp.asarray(self.embedding_scale, x_TD.dtype)
        global_rotation = self.config.global_rope.rotation(metadata.positions_T)
        local_rotation = self.config.local_rope.rotation(metadata.positions_T)
        for i, (layer, window) in enumerate(zip(self.layers, self.config.sliding_windows, strict=True)):
            x_TD, caches[i] = layer(x_TD, local_rotation if window else global_rotation, caches[i], metadata)
        return x_TD

    def logits(self, x_SD: Array) -> Array:
        """float32 [S, V] of the rows that need them."""
        logits_SV = (self.head or self.embedding).logits(self.norm(x_SD))
        cap = self.config.logits_soft_cap
        return logits_SV if cap is None else cap * jnp.tanh(logits_SV / cap)


def weight_table(config: Gemma3Config) -> WeightTable:
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
            f"{ours}.attention.q_norm.weight": same(f"{theirs}.self_attn.q_norm.weight"),
            f"{ours}.attention.k_norm.weight": same(f"{theirs}.self_attn.k_norm.weight"),
            f"{ours}.attention.out.weight": transposed(f"{theirs}.self_attn.o_proj.weight"),
            f"{ours}.attention_out_norm.weight": same(f"{theirs}.post_attention_layernorm.weight"),
            f"{ours}.mlp_norm.weight": same(f"{theirs}.pre_feedforward_layernorm.weight"),
            f"{ours}.mlp.gate.weight": transposed(f"{theirs}.mlp.gate_proj.weight"),
            f"{ours}.mlp.up.weight": transposed(f"{theirs}.mlp.up_proj.weight"),
            f"{ours}.mlp.down.weight": transposed(f"{theirs}.mlp.down_proj.weight"),
            f"{ours}.mlp_out_norm.weight": same(f"{theirs}.post_feedforward_layernorm.weight"),
        }
    return table
