"""Gemma 3, text (Gemma Team, arXiv 2503.19786): local and global layers, QK-norm, norms around each block."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

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
from jaxllm.models.rope_parameters import ROPE_DEFAULTS, rope_parameters_by_layer_type
from jaxllm.models.weight_table import WeightTable, projection, same

GEMMA3 = ConfigKeys(
    "gemma3_text",
    ROPE_DEFAULTS
    | {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
    },
    NEUTRAL | {"attn_logit_softcapping": None},  # transformers keeps it and never applies it.
)


@dataclass(frozen=True, kw_only=True)
class Gemma3Config:
    vocab_size: int
    model_dim: int
    ff_dim: int
    num_layers: int
    num_heads: int
    cache_specs: tuple[CacheSpec, ...]  # One per layer; global ones have no window.
    activation: str
    norm_eps: float
    sm_scale: float
    global_rope: RopeConfig
    local_rope: RopeConfig
    tie_embeddings: bool
    logits_soft_cap: float | None

    @classmethod
    def from_hf(cls, hf: HFConfig, max_model_len: int) -> "Gemma3Config":
        """Raises UnsupportedModelError for what these layers do not compute."""
        num_layers, pattern = hf["num_hidden_layers"], hf["sliding_window_pattern"]
        layer_types = hf.layer_types(
            ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
        )
        num_kv_heads = hf["num_key_value_heads"] or hf["num_attention_heads"]
        rope = {
            kind: make_rope(
                parameters,
                hf["head_dim"],
                max_position_embeddings=hf["max_position_embeddings"],
                max_model_len=max_model_len,
            )
            for kind, parameters in rope_parameters_by_layer_type(hf, window_theta=hf["rope_local_base_freq"]).items()
        }
        return cls(
            vocab_size=hf["vocab_size"],
            model_dim=hf["hidden_size"],
            ff_dim=hf["intermediate_size"],
            num_layers=num_layers,
            num_heads=hf["num_attention_heads"],
            cache_specs=tuple(
                CacheSpec(num_kv_heads=num_kv_heads, head_dim=hf["head_dim"], sliding_window=window)
                for window in windows_of(layer_types, hf["sliding_window"])
            ),
            activation=check_activation(hf["hidden_activation"]),
            norm_eps=hf["rms_norm_eps"],
            sm_scale=hf["query_pre_attn_scalar"] ** -0.5,
            global_rope=rope["full_attention"],
            local_rope=rope["sliding_attention"],
            tie_embeddings=bool(hf["tie_word_embeddings"]),
            logits_soft_cap=hf["final_logit_softcapping"],
        )


def max_len(hf: HFConfig) -> int:
    """The most tokens that the model was made for: Gemma 3 states it with its scaling."""
    return hf["max_position_embeddings"]


class Gemma3Layer(nnx.Module):
    def __init__(self, config: Gemma3Config, index: int, formats: WeightFormats):
        def norm() -> RMSNorm:
            return RMSNorm(config.model_dim, eps=config.norm_eps, unit_offset=True)

        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Attention(
            AttentionConfig(
                model_dim=config.model_dim,
                num_heads=config.num_heads,
                cache=config.cache_specs[index],
                sm_scale=config.sm_scale,
                qk_norm_eps=config.norm_eps,
                unit_offset_norm=True,
            ),
            formats.under("attention"),
        )
        self.mlp_norm, self.mlp_out_norm = norm(), norm()
        self.mlp = GatedMLP(config.model_dim, config.ff_dim, config.activation, formats.under("mlp"))

    def __call__(
        self, x_TD: Array, rotation: Rotation, cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Array, LayerCache]:
        attention_TD, cache = self.attention(self.attention_norm(x_TD), rotation, cache, metadata)
        x_TD = x_TD + self.attention_out_norm(attention_TD)
        return x_TD + self.mlp_out_norm(self.mlp(self.mlp_norm(x_TD), metadata)), cache


class Gemma3(nnx.Module):
    """A `LanguageModel`."""

    def __init__(self, config: Gemma3Config, formats: WeightFormats, activation_dtype: jnp.dtype):
        self.config = config
        self.activation_dtype = activation_dtype
        # The factor is rounded to the weights' dtype, as in training.
        self.embedding_scale = float(np.sqrt(config.model_dim).astype(formats.dtype))
        self.embedding = Embedding(config.vocab_size, config.model_dim, formats.dtype)
        self.layers = nnx.List([Gemma3Layer(config, i, formats.under(f"layers.{i}")) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, eps=config.norm_eps, unit_offset=True)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.model_dim, formats.dtype)

    def embed(self, token_ids_T: Array) -> Array:
        x_TD = self.embedding(token_ids_T, self.activation_dtype)
        return x_TD * jnp.asarray(self.embedding_scale, x_TD.dtype)

    def __call__(self, x_TD: Array, caches: KVCaches, metadata: StepMetadata) -> Array:
        global_rotation = self.config.global_rope.rotation(metadata.positions_T)
        local_rotation = self.config.local_rope.rotation(metadata.positions_T)
        for i, (layer, cache) in enumerate(zip(self.layers, self.config.cache_specs, strict=True)):
            rotation = local_rotation if cache.sliding_window else global_rotation
            x_TD, caches[i] = layer(x_TD, rotation, caches[i], metadata)
        return x_TD

    def logits(self, x_SD: Array) -> Array:
        logits_SV = (self.head or self.embedding).logits(self.norm(x_SD))
        cap = self.config.logits_soft_cap
        return logits_SV if cap is None else cap * jnp.tanh(logits_SV / cap)


def weight_table(config: Gemma3Config) -> WeightTable:
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
            f"{ours}.attention.q_norm.weight": same(f"{theirs}.self_attn.q_norm.weight"),
            f"{ours}.attention.k_norm.weight": same(f"{theirs}.self_attn.k_norm.weight"),
            f"{ours}.attention.out": projection(f"{theirs}.self_attn.o_proj"),
            f"{ours}.attention_out_norm.weight": same(f"{theirs}.post_attention_layernorm.weight"),
            f"{ours}.mlp_norm.weight": same(f"{theirs}.pre_feedforward_layernorm.weight"),
            f"{ours}.mlp.gate": projection(f"{theirs}.mlp.gate_proj"),
            f"{ours}.mlp.up": projection(f"{theirs}.mlp.up_proj"),
            f"{ours}.mlp.down": projection(f"{theirs}.mlp.down_proj"),
            f"{ours}.mlp_out_norm.weight": same(f"{theirs}.post_feedforward_layernorm.weight"),
        }
    return table


_FAMILY = Family(GEMMA3, Gemma3Config.from_hf, max_len, Gemma3, weight_table, refused_dtypes=("float16",))
FAMILIES = {"Gemma3ForCausalLM": _FAMILY, "Gemma3ForConditionalGeneration": _FAMILY}
