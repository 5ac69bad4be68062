"""Rotary position embedding (Su et al., arXiv 2104.09864) and its extensions to longer contexts."""

import math
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


def make_rope(config: dict[str, Any], head_dim: int, max_model_len: int, *, theta: float | None = None) -> RopeConfig:
    """The rotation a Hugging Face config asks for.

    Reads `rope_parameters` (new files) or `rope_theta` and `rope_scaling` (older ones). Formulas: linear, Chen et
    al., arXiv 2306.15595; dynamic NTK, the NTK-aware interpolation of the same context; yarn, Peng et al., arXiv
    2309.00071; longrope, Ding et al., arXiv 2402.13753; llama3, the Llama 3.1 model card; factors, the divisors that
    GGUF files store.

    "dynamic" and "longrope" depend on the length of the text. A paged cache is shared by texts of all lengths, so
    the length taken is `max_model_len`: one fixed rotation, whatever else is in the batch.

    Args:
      config: the model's config.json.
      head_dim: H.
      max_model_len: the longest sequence that will be served.
      theta: replaces the config's base and drops its scaling (local layers of Gemma 3).

    Raises:
      UnsupportedModelError: a rope_type that is not in ROPE_TYPES.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = dict(parameters or config.get("rope_scaling") or {})
    if theta is not None:
        scaling = {}
    base = theta or parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    dim = int(head_dim * (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    original_len = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    max_position = config.get("max_position_embeddings", max_model_len)
    inv_freq = _inv_freq(base, dim)
    scale = 1.0
    match rope_type:
        case "default":
            pass
        case "linear":
            inv_freq = inv_freq / scaling["factor"]
        case "factors":
            inv_freq = inv_freq / np.asarray(scaling["factors"], np.float64)
        case "dynamic":
            inv_freq = _dynamic(base, dim, scaling["factor"], original_len or max_position, max_model_len)
        case "llama3":
            inv_freq = _llama3(inv_freq, scaling, original_len or max_position)
        case "yarn":
            factor = scaling.get("factor") or max_position / (original_len or max_position)
            inv_freq = _yarn(inv_freq, base, dim, factor, original_len or max_position, scaling)
            scale = _yarn_scale(factor, scaling)
        case "longrope":
            original_len = original_len or max_position
            name = "long_factor" if max_model_len > original_len else "short_factor"
            inv_freq = inv_freq / np.asarray(scaling[name], np.float64)
            factor = max_position / original_len if original_len != max_position else scaling.get("factor", 1.0)
            scale = scaling.get("attention_factor") or (
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


def _llama3(inv_freq: np.ndarray, scaling: dict[str, Any], original_len: int) -> np.ndarray:
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = original_len * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor)


def _yarn(
    inv_freq: np.ndarray, base: float, dim: int, factor: float, original_len: int, scaling: dict[str, Any]
) -> np.ndarray:
    def dim_of(turns: float) -> float:
        return dim * math.log(original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


def _yarn_scale(factor: float, scaling: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
