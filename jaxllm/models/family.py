"""What the engine asks of a family of models. Each family's file states its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.kv_caches import KVCaches
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.layers.weight_format import WeightFormats
from jaxllm.models.hf_config import ConfigKeys, HFConfig
from jaxllm.models.weight_table import WeightTable


class ModelConfig(Protocol):
    """The sizes of a model."""

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


class LanguageModel(Protocol):
    """The Flax module, as the step program calls it: `logits(model(embed(token_ids_T), caches, metadata)[rows_S])`."""

    def embed(self, token_ids_T: Array) -> Array:
        """What the first layer gets for these tokens, [T, D]. An image gives its own rows in their place."""
        ...

    def __call__(self, x_TD: Array, caches: KVCaches, metadata: StepMetadata) -> Array:
        """Hidden states [T, D] before the last norm. The caches then have this step's K and V."""
        ...

    def logits(self, x_SD: Array) -> Array:
        """float32 [S, V] of the rows that need them."""
        ...


@dataclass(frozen=True)
class Family:
    """How to read a family's config, build its model (under `nnx.eval_shape`) and fill it.

    `keys` are what is read of config.json, `max_len` the most tokens that the model was made for. `model` takes the
    config, the formats of its weights and the dtype of what passes between dots; it gives a `LanguageModel`.
    `refused_dtypes` are those in which the family's activations are known to overflow.
    """

    keys: ConfigKeys
    parse_config: Callable[[HFConfig, int], Any]
    max_len: Callable[[HFConfig], int]
    model: Callable[[Any, WeightFormats, jnp.dtype], nnx.Module]
    weight_table: Callable[[Any], WeightTable]
    refused_dtypes: tuple[str, ...] = ()

    def hf_config(self, config_json: dict[str, Any]) -> HFConfig:
        """The text model's config, also where it is a part of a multimodal one. Raises UnsupportedModelError."""
        text = config_json.get("text_config")
        if text is None:
            return HFConfig(config_json, self.keys)
        whole = {key: config_json[key] for key in ("tie_word_embeddings",) if key in config_json}
        return HFConfig(text | whole, self.keys)
