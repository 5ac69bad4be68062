"""The metadata of a GGUF file, told as a Hugging Face `config.json` and `generation_config.json`."""

from typing import Any

import numpy as np

from jaxllm.errors import CorruptCheckpointError, UnsupportedModelError
from jaxllm.loading.gguf_file import GGUFFile

MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""By `general.architecture`."""

ROPE_FACTORS = "rope_freqs.weight"
GEMMA3_LOCAL_ROPE_THETA = 10_000.0
GEMMA3_SLIDING_WINDOW_PATTERN = 6
GEMMA3_27B_NUM_LAYERS = 62

WITHOUT_EFFECT = frozenset(
    {"vocab_size", "attention.layer_norm_epsilon", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
    | {"mm.tokens_per_image"}
)
"""Fields that say the same as something that is read, or change no logits of these models."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
}
"""Values with which a field that is not known asks for nothing; of others: 0 and nothing."""
HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
"""Fields that must be the size of a head."""

# Files name one end-of-sequence token; chat models end their turns by further ones, known by their text.
TURN_ENDS = frozenset({"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"})


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Raises UnsupportedModelError for an architecture or a feature that this version does not know."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{file.path} is of architecture {architecture!r}; this version knows {', '.join(MODEL_TYPES)}."
        )
    fields = _Fields(file, architecture)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{file.path} rotates {rotated} of a head's {head_dim} dimensions; this version rotates all."
        )
    model_type, model_class = MODEL_TYPES[architecture]
    sliding_window = fields.optional("attention.sliding_window")
    if architecture == "llama" and sliding_window:  # llama.cpp has one name for both families
        model_type, model_class = "mistral", "MistralForCausalLM"
    if architecture.startswith("qwen") and sliding_window:
        raise UnsupportedModelError(
            f"{file.path} has attention.sliding_window = {sliding_window}, which llama.cpp does not know of "
            f"{architecture} models; convert it again without one."
        )

    config = {
        "model_type": model_type,
        "architectures": [model_class],
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
        "rope_scaling": _rope_scaling(fields),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": sliding_window,
        **_token_ids(file),
    }
    config |= _gemma3(fields, head_dim) if architecture == "gemma3" else {}
    fields.refuse_the_rest(head_dim)
    return config


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """`eos_token_id` is the list of all tokens that end a turn."""
    metadata = file.metadata
    ends = {token_id(metadata, name) for name in ("eos", "eot", "eom")}
    ends |= {i for i, token in enumerate(metadata.get("tokenizer.ggml.tokens", ())) if token in TURN_ENDS}
    return _token_ids(file) | {"eos_token_id": sorted(end for end in ends if end is not None)}


def _gemma3(fields: "_Fields", head_dim: int) -> dict[str, Any]:
    """What llama.cpp knows without being told by the file."""
    is_27b = fields.integer("block_count") == GEMMA3_27B_NUM_LAYERS
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            fields.integer("embedding_length") // fields.integer("attention.head_count") if is_27b else head_dim
        ),
        "rope_local_base_freq": fields.optional("rope.freq_base_swa") or GEMMA3_LOCAL_ROPE_THETA,
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", GEMMA3_SLIDING_WINDOW_PATTERN),
        "attn_logit_softcapping": fields.optional("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional("final_logit_softcapping"),
    }


def _rope_scaling(fields: "_Fields") -> dict[str, Any] | None:
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
    if ROPE_FACTORS in fields.file.tensors and fields.architecture == "llama":
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


class _Fields:
    """The metadata under the name of the architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    @property
    def embedding_shape(self) -> tuple[int, ...]:
        if "token_embd.weight" not in self.file.tensors:
            raise CorruptCheckpointError(f"{self.file.path} has no tensor token_embd.weight. Download it again.")
        return self.file.tensors["token_embd.weight"].shape

    def optional(self, name: str) -> Any:
        self._read.add(name)
        return self.file.metadata.get(self._prefix + name)

    def required(self, name: str) -> Any:
        if (value := self.optional(name)) is None:
            raise CorruptCheckpointError(f"{self.file.path} lacks the metadata {self._prefix}{name}. Convert it again.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.required(name) if default is None else self.optional(name)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, int):
            raise UnsupportedModelError(
                f"{self._prefix}{name} in {self.file.path} is {value!r}; this version knows one number for all layers."
            )
        return value

    def names_under(self, prefix: str) -> set[str]:
        start = self._prefix + prefix
        return {key.removeprefix(start) for key in self.file.metadata if key.startswith(start)}

    def refuse_the_rest(self, head_dim: int) -> None:
        """Raises UnsupportedModelError for a field that nobody has read and that asks for something."""
        for name in sorted(self.names_under("") - self._read - WITHOUT_EFFECT):
            value = self.optional(name)
            if name in HEAD_SIZES:
                is_neutral = value == head_dim
            elif name in NEUTRAL:
                is_neutral = value in NEUTRAL[name]
            else:
                is_neutral = not (value if np.ndim(value) == 0 else any(value))
            if not is_neutral:
                raise UnsupportedModelError(
                    f"{self.file.path} has {self._prefix}{name} = {value}, which this version does not know."
                )
