"""Which of our models serves a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.models import gemma3, llama
from jaxllm.models.hf_config import ConfigKeys, HFConfig
from jaxllm.models.weight_table import WeightTable


class ModelConfig(Protocol):
    """What the engine asks of every family's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def model_dim(self) -> int: ...
    @property
    def ff_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]: ...  # One per layer.


@dataclass(frozen=True)
class Family:
    """How to read a family's config, build its model (under `nnx.eval_shape`) and fill it.

    `keys` are what is read of config.json, `max_len` the most tokens that the model was made for. `model` takes the
    config, the weights' dtype and that of what passes between dots. `refused_dtypes` are those in which the family's
    activations are known to overflow.
    """

    keys: ConfigKeys
    parse_config: Callable[[HFConfig, int], Any]
    max_len: Callable[[HFConfig], int]
    model: Callable[[Any, jnp.dtype, jnp.dtype], nnx.Module]
    weight_table: Callable[[Any], WeightTable]
    refused_dtypes: tuple[str, ...] = ()

    def hf_config(self, config_json: dict[str, Any]) -> HFConfig:
        """The text model's config, also where it is a part of a multimodal one. Raises UnsupportedModelError."""
        text = config_json.get("text_config")
        if text is None:
            return HFConfig(config_json, self.keys)
        whole = {key: config_json[key] for key in ("tie_word_embeddings",) if key in config_json}
        return HFConfig(text | whole, self.keys)


def _llama(keys: ConfigKeys) -> Family:
    return Family(keys, llama.LlamaConfig.from_hf, llama.max_len, llama.Llama, llama.weight_table)


_GEMMA3 = Family(
    gemma3.GEMMA3,
    gemma3.Gemma3Config.from_hf,
    gemma3.max_len,
    gemma3.Gemma3,
    gemma3.weight_table,
    refused_dtypes=("float16",),
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama(llama.LLAMA),
    "MistralForCausalLM": _llama(llama.MISTRAL),
    "Qwen2ForCausalLM": _llama(llama.QWEN2),
    "Qwen3ForCausalLM": _llama(llama.QWEN3),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


def find_family(config_json: dict[str, Any]) -> Family:
    """The family of the first architecture that we know. Raises UnsupportedModelError, which lists those."""
    architectures = config_json.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"architecture {', '.join(architectures) or 'not named in the config'} is not supported; "
        f"supported: {', '.join(FAMILIES)}"
    )
