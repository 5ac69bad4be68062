"""The metadata of a GGUF file, told as a Hugging Face `config.json` and `generation_config.json`."""

from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.loading.gguf_architectures import ARCHITECTURES, ROPE_FACTORS, Architecture
from jaxllm.loading.gguf_fields import GGUFFields
from jaxllm.loading.gguf_file import GGUFFile

# Files name one end-of-sequence token; chat models end their turns by further ones, known by their text.
TURN_ENDS = frozenset({"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModelError for one that this version does not know."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} is of architecture {name!r}; this version knows {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Raises UnsupportedModelError for an architecture or a feature that this version does not know."""
    architecture = architecture_of(file)
    fields = GGUFFields(file)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{file.path} rotates {rotated} of a head's {head_dim} dimensions; this version rotates all."
        )
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "vocab_size": fields.embedding_shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": fields.optional("rope.freq_base") or 10_000.0,
        "rope_scaling": _rope_scaling(fields, architecture),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": None,
        **_token_ids(file),
        **architecture.config(fields, head_dim),
    }
    fields.refuse_the_rest(head_dim)
    return config


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """`eos_token_id` is the list of all tokens that end a turn."""
    metadata = file.metadata
    ends = {token_id(metadata, name) for name in ("eos", "eot", "eom")}
    ends |= {i for i, token in enumerate(metadata.get("tokenizer.ggml.tokens", ())) if token in TURN_ENDS}
    return _token_ids(file) | {"eos_token_id": sorted(end for end in ends if end is not None)}


def _rope_scaling(fields: GGUFFields, architecture: Architecture) -> dict[str, Any] | None:
    """As llama.cpp reads it: a factor without a type is linear, and 0 stands for none. Llama 3.1 and later store the
    outcome of their formula: one divisor for each frequency."""
    kind = fields.optional("rope.scaling.type") or "linear"
    factor, older = fields.optional("rope.scaling.factor"), fields.optional("rope.scale_linear")
    factor = (older if factor is None else factor) or 1.0
    # Only yarn has a use for the length before.
    original_len = fields.optional("rope.scaling.original_context_length") or fields.integer("context_length")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{fields.file.path} scales rotary embeddings by {kind!r}; this version knows none, linear, yarn and "
            "Llama 3's factors."
        )
    is_scaled = kind != "none" and factor != 1.0
    if architecture.has_rope_factors and ROPE_FACTORS in fields.file.tensors:
        if is_scaled:
            raise UnsupportedModelError(
                f"{fields.file.path} scales rotary embeddings twice: by {ROPE_FACTORS}, and {kind!r} by {factor}; this "
                "version knows one of them at a time."
            )
        return {"rope_type": "factors", "factors": fields.file.read(ROPE_FACTORS).tolist()}
    if not is_scaled and kind != "yarn":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original_len
        betas = {name: fields.optional(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
    return scaling


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    stored_names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: token_id(file.metadata, stored) for name, stored in stored_names.items()}


def token_id(metadata: dict[str, Any], name: str) -> int | None:
    """Of a special token. One outside the vocabulary stands for none, as in llama.cpp: converters stored -1."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens")
    return None if found is None or (tokens is not None and not 0 <= found < len(tokens)) else int(found)
