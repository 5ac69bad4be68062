"""The sampling settings that travel with a request's row to the device. Each is declared here, and only here."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import numpy as np

from jaxllm.scheduler.errors import RequestRefusedError

_MAX_INT32, _MAX_UINT32 = 2**31 - 1, 2**32 - 1


def setting(neutral: float, dtype: type, limit: str, is_allowed: Callable[[float], bool]) -> Any:
    """Declares a setting: its value in rows that do not ask for it, its dtype (of 4 bytes) on the device, and which
    values may be asked for."""
    return field(default=neutral, metadata={"dtype": np.dtype(dtype), "limit": limit, "is_allowed": is_allowed})


@dataclass(frozen=True)
class SamplingRow:
    """The sampling settings of one request. Padding rows have the defaults.

    A setting that is declared here has a column of the `RunningTable`, an array of the `StepBatch` and one of the
    sampler's `SamplingArrays`, in this order. Where `SamplingParams` has an option of its name, it is that option.

    Raises RequestRefusedError: a setting is out of range.
    """

    temperature: float = setting(0.0, np.float32, "a finite number, 0 or more", lambda value: 0 <= value < float("inf"))
    """0 takes the likeliest token."""

    top_k: int = setting(0, np.int32, f"from 0 to {_MAX_INT32:,}", lambda value: 0 <= value <= _MAX_INT32)
    """Sample among the k likeliest tokens; 0 is off."""

    top_p: float = setting(1.0, np.float32, "above 0 and at most 1", lambda value: 0 < value <= 1)
    """Sample among the likeliest tokens that together reach this probability; 1 is off."""

    min_p: float = setting(0.0, np.float32, "from 0 to 1", lambda value: 0 <= value <= 1)
    """Drop tokens less likely than this fraction of the likeliest one; 0 is off."""

    seed: int = setting(0, np.uint32, f"from 0 to {_MAX_UINT32:,}", lambda value: 0 <= value <= _MAX_UINT32)
    """The same seed at the same position draws the same number, so that a token that is sampled a second time after a
    preemption comes out the same."""

    wants_logprobs: bool = setting(False, np.int32, "True or False", lambda value: value in (False, True))
    """Whether each token is to come with log-probabilities."""

    def __post_init__(self) -> None:
        for declared in fields(self):
            value = getattr(self, declared.name)
            if not declared.metadata["is_allowed"](value):
                limit = declared.metadata["limit"]
                raise RequestRefusedError(f"{declared.name} is {value}; it must be {limit}", param=declared.name)

    @classmethod
    @cache
    def dtypes(cls) -> Mapping[str, np.dtype]:
        """Of each setting, by its name."""
        return {declared.name: declared.metadata["dtype"] for declared in fields(cls)}

    @cached_property
    def bits(self) -> np.ndarray:
        """int32[F]: the F settings in their order, each as the 4 bytes of its dtype."""
        dtypes = self.dtypes()
        layout = "=" + "".join(dtype.char for dtype in dtypes.values())
        return np.frombuffer(struct.pack(layout, *(getattr(self, name) for name in dtypes)), np.int32)
