"""The parameters of RoPE in a config.json, whatever its age, and how long they make the model's context.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`. What is stated twice, and what is stated
nowhere, is settled as transformers does it.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.models.hf_config import LAYER_TYPES, HFConfig

RopeParameters = dict[str, Any]
"""Flat, with `rope_type` and `rope_theta`; the rest depends on the type (`layers/rope.py`)."""

ROPE_DEFAULTS = {
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "max_position_embeddings": 2048,
}
"""The keys that are read here, and their values in most families."""

_KNOW_THEIR_ORIGINAL_LEN = ("llama3", "yarn", "longrope")


def rope_parameters(config: HFConfig) -> RopeParameters:
    """The one rotation of all layers."""
    stated = config["rope_scaling"] or config["rope_parameters"] or {}
    if nested := [key for key in stated if key in LAYER_TYPES]:
        raise UnsupportedModelError(
            f"the config's rope_parameters have parts ({', '.join(nested)}); {config.model_type} models rotate all "
            "layers alike"
        )
    parameters = _completed(stated, config, config["rope_theta"])
    if parameters["rope_type"] in _KNOW_THEIR_ORIGINAL_LEN and (original := config["original_max_position_embeddings"]):
        parameters["original_max_position_embeddings"] = original
    return parameters


def rope_parameters_by_layer_type(config: HFConfig, *, window_theta: float) -> dict[str, RopeParameters]:
    """The rotations of the layers that attend to all and of those with a window.

    window_theta: the base of the latter, where `rope_parameters` does not state it.
    """
    stated = config["rope_parameters"] or {}
    if stated and not any(key in stated for key in LAYER_TYPES):
        raise UnsupportedModelError(
            f"the config's rope_parameters are those of one rotation ({', '.join(stated)}); {config.model_type} models "
            f"have one for each of {', '.join(LAYER_TYPES)}"
        )
    full = {**(stated.get("full_attention") or {}), **(config["rope_scaling"] or {})}
    return {
        "full_attention": _completed(full, config, config["rope_theta"]),
        "sliding_attention": _completed(stated.get("sliding_attention") or {}, config, window_theta),
    }


def _completed(stated: Mapping[str, Any], config: HFConfig, rope_theta: float) -> RopeParameters:
    parameters = {"rope_theta": rope_theta} | {key: value for key, value in stated.items() if value is not None}
    parameters["rope_type"] = stated.get("rope_type") or stated.get("type") or "default"
    if config["partial_rotary_factor"] is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if parameters["rope_type"] in _KNOW_THEIR_ORIGINAL_LEN:
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return parameters


def extended_len(max_position_embeddings: int, parameters: RopeParameters) -> int:
    """The most tokens that the model was made for, by the rule of vLLM.

    `max_position_embeddings` is the length before a scaling of type linear or dynamic, and after one of llama3 and
    longrope. Yarn's files have either there, and state the length before.
    """
    factor = parameters.get("factor")
    match parameters["rope_type"]:
        case "linear" | "dynamic" if factor:
            return int(max_position_embeddings * factor)
        case "yarn" if factor:
            return int(parameters["original_max_position_embeddings"] * factor)
        case _:
            return max_position_embeddings
