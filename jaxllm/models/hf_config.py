"""A config.json as transformers reads it: what it leaves out has the default of its family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import UnsupportedModelError

LAYER_TYPES = ("full_attention", "sliding_attention")

NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "per_layer_config": None,
}
"""What no family computes: keys that change the mathematics, and the value at which they do not."""

_MAY_BE_NULL = ("num_key_value_heads", "sliding_window", "tie_word_embeddings")


@dataclass(frozen=True)
class ConfigKeys:
    """What is read of a family's config.json.

    defaults: every key that is read, with its value where the file has none: that of transformers' config class.
    neutral: keys that must have this value, if the file has them (see NEUTRAL).
    """

    model_type: str
    defaults: Mapping[str, Any]
    neutral: Mapping[str, Any]


class HFConfig:
    """`config[key]`: what the file states, null included, or else the default. Only keys of ConfigKeys can be read.

    Raises UnsupportedModelError: the file is of another model_type, or a key has a value that is not supported.
    """

    def __init__(self, stated: Mapping[str, Any], keys: ConfigKeys):
        self._stated, self._keys = stated, keys
        model_type = stated.get("model_type", keys.model_type)
        if model_type != keys.model_type:
            raise UnsupportedModelError(
                f"the config's model_type is {model_type!r}; its architecture needs {keys.model_type!r}"
            )
        for key, neutral in keys.neutral.items():
            value = stated.get(key, neutral)
            if value != neutral and (value or neutral):  # null says as little as False
                raise UnsupportedModelError(
                    f"the config's {key} is {value!r}, which is not supported for {model_type} models; "
                    f"supported is {neutral!r}"
                )

    @property
    def model_type(self) -> str:
        return self._keys.model_type

    def __getitem__(self, key: str) -> Any:
        default = self._keys.defaults[key]
        value = self._stated.get(key, default)
        if value is None and default is not None and key not in _MAY_BE_NULL:
            raise UnsupportedModelError(f"the config's {key} is null; leave it out for {default!r}, or give a value")
        return value

    def layer_types(self, default: list[str]) -> list[str]:
        """The attention of each layer, one of LAYER_TYPES: as stated, or `default`."""
        layer_types = self["layer_types"] or default
        if unknown := sorted(set(layer_types) - set(LAYER_TYPES)):
            raise UnsupportedModelError(
                f"the config's layer_types have {', '.join(map(repr, unknown))}; known: {', '.join(LAYER_TYPES)}"
            )
        if len(layer_types) != self["num_hidden_layers"]:
            raise UnsupportedModelError(
                f"the config has {len(layer_types)} layer_types and {self['num_hidden_layers']} num_hidden_layers"
            )
        return layer_types


def windows_of(layer_types: list[str], window: int | None) -> tuple[int | None, ...]:
    """The sliding window of each layer; None for those that attend to all."""
    if "sliding_attention" in layer_types and not window:
        raise UnsupportedModelError(
            "the config's layer_types have 'sliding_attention', and it has no sliding window for them: sliding_window "
            "is null, or use_sliding_window is not true"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
