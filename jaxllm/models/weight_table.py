"""Which tensors of a checkpoint make up a parameter, and how.

Hugging Face stores projections as [out, in], ours are [in, out] (`layers/linear.py`), and Q, K and V are one.
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
    """Three of [heads * H, D] -> [D, K * (G+2) * H]."""
    return Source(_qkv_names(prefix, "weight"), lambda *qkv: _by_kv_head(qkv, num_kv_heads, head_dim).T)


def fused_qkv_bias(prefix: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Source:
    """Three of [heads * H] -> [K * (G+2) * H]."""
    return Source(_qkv_names(prefix, "bias"), lambda *qkv: _by_kv_head(qkv, num_kv_heads, head_dim))


def _qkv_names(prefix: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{x}_proj.{kind}" for x in "qkv")


def _by_kv_head(qkv: tuple[np.ndarray, ...], num_kv_heads: int, head_dim: int) -> np.ndarray:
    """[heads * H, ...] each -> [K * (G+2) * H, ...]."""
    by_head = [x.reshape(num_kv_heads, -1, head_dim, *x.shape[1:]) for x in qkv]
    return np.concatenate(by_head, axis=1).reshape(-1, *qkv[0].shape[1:])
