"""Which tensors of a checkpoint make up a parameter, and how.

Hugging Face stores projections as [out, in]. Ours are laid out for the einsums of `layers/`: input axes first, heads
kept apart, and what is multiplied by the same input fused into one weight.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Source:
    """`assemble(*tensors)` of the named tensors gives the parameter."""

    names: tuple[str, ...]
    assemble: Callable[..., np.ndarray]


WeightTable = dict[str, Source]


def same(name: str) -> Source:
    """The tensor as it is."""
    return Source((name,), lambda x: x)


def transposed(name: str) -> Source:
    """[out, in] -> [in, out]."""
    return Source((name,), lambda x: x.T)


def fused_qkv(prefix: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Source:
    """Three of [heads * H, D] -> [D, K, G+2, H]."""
    return Source(
        _qkv_names(prefix, "weight"), lambda *qkv: np.moveaxis(_by_kv_head(qkv, num_kv_heads, head_dim), 3, 0)
    )


def fused_qkv_bias(prefix: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Source:
    """Three of [heads * H] -> [K, G+2, H]."""
    return Source(_qkv_names(prefix, "bias"), lambda *qkv: _by_kv_head(qkv, num_kv_heads, head_dim))


def fused_gate_up(prefix: str) -> Source:
    """Two of [F, D] -> [D, 2, F]."""
    names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    return Source(names, lambda gate, up: np.moveaxis(np.stack([gate, up]), 2, 0))


def _qkv_names(prefix: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{x}_proj.{kind}" for x in "qkv")


def _by_kv_head(qkv: tuple[np.ndarray, ...], num_kv_heads: int, head_dim: int) -> np.ndarray:
    """[heads * H, ...] each -> [K, G+2, H, ...]."""
    return np.concatenate([x.reshape(num_kv_heads, -1, head_dim, *x.shape[1:]) for x in qkv], axis=1)
