"""Rotary position embedding (Su et al., arXiv 2104.09864) and its extensions to longer contexts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxllm.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "factors")


class Rotation(NamedTuple):
    """The step's cosines and sines, float32 [T, R] for the R rotated dimensions of a head; shared by all layers.

    `sin_TR` is negative in its first half, which makes a rotation `x * cos + swap_halves(x) * sin`.
    """

    cos_TR: Array
    sin_TR: Array


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Inverse frequencies by dimension pair and the factor of cosines and sines; hashable and static."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def rotation(self, positions_T: Array) -> Rotation:
        angles_TH = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(self.inv_freq, jnp.float32)[None, :]
        cos_TH, sin_TH = jnp.cos(angles_TH) * self.scale, jnp.sin(angles_TH) * self.scale
        rotation = Rotation(jnp.concatenate([cos_TH, cos_TH], 1), jnp.concatenate([-sin_TH, sin_TH], 1))
        # Else XLA computes them anew in every layer.
        return Rotation(*lax.optimization_barrier(tuple(rotation)))


def rotate(x_TNH: Array, rotation: Rotation) -> Array:
    """Rotates the pairs (i, i + R/2) of each head's first R dimensions, in float32."""
    cos_T1R, sin_T1R = rotation.cos_TR[:, None], rotation.sin_TR[:, None]
    R = cos_T1R.shape[-1]
    x_TNR = x_TNH[..., :R]
    x32 = x_TNR.astype(jnp.float32)
    rotated = (x32 * cos_T1R + _swap_halves(x_TNR) * sin_T1R).astype(x_TNH.dtype)
    return rotated if x_TNH.shape[-1] == R else jnp.concatenate([rotated, x_TNH[..., R:]], axis=-1)


def _swap_halves(x_TNR: Array) -> Array:
    """float32. Exchanges the halves of each head."""
    R = x_TNR.shape[-1]

    def by_roll(x_TNR: Array) -> Array:
        return jnp.roll(x_TNR, R // 2, axis=-1).astype(jnp.float32)

    def by_product(x_TNR: Array) -> Array:
        """Exact: each sum has one term that is not zero. Half a head is half a register of a TPU, and to take it out
        XLA lays out everything anew, and back."""
        swap_RR = jnp.roll(jnp.eye(R, dtype=x_TNR.dtype), R // 2, axis=1)
        return jnp.matmul(x_TNR, swap_RR, preferred_element_type=jnp.float32)

    if x_TNR.dtype.itemsize > 2:
        return by_roll(x_TNR)
    return lax.platform_dependent(x_TNR, tpu=by_product, default=by_roll)


def make_rope(
    parameters: Mapping[str, Any], head_dim: int, *, max_position_embeddings: int, max_model_len: int
) -> RopeConfig:
    """The rotation that a model's RoPE parameters ask for.

    Formulas: linear, Chen et al., arXiv 2306.15595; dynamic NTK, the NTK-aware interpolation of the same context; yarn,
    Peng et al., arXiv 2309.00071; longrope, Ding et al., arXiv 2402.13753; llama3, the Llama 3.1 model card; factors,
    the divisors that GGUF files store.

    "dynamic" and "longrope" depend on the length of the text. A paged cache is shared by texts of all lengths, so
    the length taken is `max_model_len`: one fixed rotation, whatever else is in the batch.

    Args:
      parameters: `rope_type`, `rope_theta`, `partial_rotary_factor` if it is not 1, and what the type needs, under the
        names of Hugging Face's `rope_parameters`.
      head_dim: H.
      max_position_embeddings: of the model's config.
      max_model_len: the longest sequence that will be served.

    Raises:
      UnsupportedModelError: a rope_type that is not in ROPE_TYPES, or a parameter that it needs is missing.
    """
    try:
        return _make_rope(parameters, head_dim, max_position_embeddings, max_model_len)
    except KeyError as error:
        raise UnsupportedModelError(
            f"a rope_type of {parameters['rope_type']!r} needs {error}, which is missing"
        ) from error


def _make_rope(
    parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int, max_model_len: int
) -> RopeConfig:
    base, rope_type = parameters["rope_theta"], parameters["rope_type"]
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    original_len = parameters.get("original_max_position_embeddings", max_position_embeddings)
    factor = parameters.get("factor")
    inv_freq = _inv_freq(base, dim)
    scale = 1.0
    match rope_type:
        case "default":
            pass
        case "linear":
            inv_freq = inv_freq / parameters["factor"]
        case "factors":
            inv_freq = inv_freq / np.asarray(parameters["factors"], np.float64)
        case "dynamic":
            inv_freq = _dynamic(base, dim, parameters["factor"], max_position_embeddings, max_model_len)
        case "llama3":
            inv_freq = _llama3(inv_freq, parameters, original_len)
        case "yarn":
            factor = factor or max_position_embeddings / original_len
            inv_freq = _yarn(inv_freq, base, dim, factor, original_len, parameters)
            scale = _yarn_scale(factor, parameters)
        case "longrope":
            name = "long_factor" if max_model_len > original_len else "short_factor"
            inv_freq = inv_freq / np.asarray(parameters[name], np.float64)
            factor = factor or max_position_embeddings / original_len
            scale = parameters.get("attention_factor") or (
                math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
            )
        case _:
            raise UnsupportedModelError(f"rope_type {rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    return RopeConfig(inv_freq=tuple(inv_freq.tolist()), scale=scale)


def _inv_freq(base: float, dim: int) -> np.ndarray:
    return base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def _dynamic(base: float, dim: int, factor: float, original_len: int, length: int) -> np.ndarray:
    length = max(length, original_len)
    base *= (factor * length / original_len - (factor - 1)) ** (dim / (dim - 2))
    return _inv_freq(base, dim)


def _llama3(inv_freq: np.ndarray, parameters: Mapping[str, Any], original_len: int) -> np.ndarray:
    low, high, factor = parameters["low_freq_factor"], parameters["high_freq_factor"], parameters["factor"]
    turns = original_len * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor)


def _yarn(
    inv_freq: np.ndarray, base: float, dim: int, factor: float, original_len: int, parameters: Mapping[str, Any]
) -> np.ndarray:
    def dim_of(turns: float) -> float:
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(parameters.get("beta_fast") or 32), dim_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


def _yarn_scale(factor: float, parameters: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(parameters["mscale"]) / mscale(parameters["mscale_all_dim"])
    return mscale(1.0)
