"""Which tensors of a checkpoint make up a parameter, and how.

Hugging Face stores projections as [out, in], ours are [in, out] (`layers/linear.py`).
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
