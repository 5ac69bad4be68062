"""Which of our models serves a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx

from jaxllm.errors import UnsupportedModelError
from jaxllm.models import gemma3, llama
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
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def sliding_windows(self) -> tuple[int | None, ...]: ...  # One per layer; None attends to all.


@dataclass(frozen=True)
class Family:
    """How to read a family's config, build its model (under `nnx.eval_shape`) and fill it.

    `model` takes the config, the weights' dtype and that of what passes between dots.
    `prefix` stands before the text model's tensor names in the checkpoint, `ignored_prefixes` before those of parts
    that are not ours (a vision tower).
    `refused_dtypes`: in which the family's activations are known to overflow.
    """

    parse_config: Callable[[dict[str, Any], int], Any]
    model: Callable[[Any, jnp.dtype, jnp.dtype], nnx.Module]
    weight_table: Callable[[Any], WeightTable]
    prefix: str = ""
    ignored_prefixes: tuple[str, ...] = ()
    refused_dtypes: tuple[str, ...] = ()


_LLAMA = Family(llama.LlamaConfig.from_hf, llama.Llama, llama.weight_table)
_GEMMA3 = Family(gemma3.Gemma3Config.from_hf, gemma3.Gemma3, gemma3.weight_table, refused_dtypes=("float16",))
_GEMMA3_IN_MULTIMODAL = replace(
    _GEMMA3, prefix="language_model.", ignored_prefixes=("vision_tower.", "multi_modal_projector.")
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3_IN_MULTIMODAL,
}


def find_family(hf_config: dict[str, Any]) -> Family:
    """The family of the first architecture that we know. Raises UnsupportedModelError, which lists those."""
    architectures = hf_config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"architecture {', '.join(architectures) or 'not named in the config'} is not supported; "
        f"supported: {', '.join(FAMILIES)}"
    )
