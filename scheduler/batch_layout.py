"""Where the arrays of a step lie in its one buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxllm.scheduler.buckets import Bucket
from jaxllm.scheduler.sampling_row import SamplingRow

_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class Field:
    """Where an array lies in the buffer: `shape` elements of `dtype` (of 4 bytes), from element `offset`."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)

    def view(self, buffer: Any) -> Any:
        """The array that lies in `buffer` (int32[n]), of numpy or of JAX."""
        return buffer[self.offset : self.end].view(self.dtype).reshape(self.shape)


class Offsets(NamedTuple):
    """Where the arrays begin that the builder writes one by one."""

    token_ids: int
    positions: int
    cu_q_lens: int
    kv_lens: int
    page_table: int
    rows: int
    logits_rows: int
    from_device: int
    num_draft_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """How the arrays of a step lie in one int32 buffer: for the builder on the host, and for the program on the device.

    bucket: the T and S of the arrays.
    fields: the arrays, in order and without gaps. Their names and meanings are those of `StepBatch`.
    offsets: where those begin that are written one by one.
    sampling_names: those of the F sampling settings, which follow each other.
    sampling: int32[F, S], one array over all of them.
    size: elements of the buffer.
    """

    bucket: Bucket
    fields: Mapping[str, Field]
    offsets: Offsets
    sampling_names: tuple[str, ...]
    sampling: Field
    size: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(bucket: Bucket, max_pages_per_seq: int, num_groups: int) -> "BatchLayout":
        """The layout for steps of this bucket, with so many pages of each group a row (P), and so many groups (G)."""
        T, S, P, G = bucket.num_tokens, bucket.num_seqs, max_pages_per_seq, num_groups
        sampling = SamplingRow.dtypes()
        shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "token_ids": ((T,), _INT32),
            "positions": ((T,), _INT32),
            "cu_q_lens": ((S + 1,), _INT32),
            "kv_lens": ((S,), _INT32),
            "page_table": ((G, S, P), _INT32),
            "rows": ((S,), _INT32),
            "logits_rows": ((S,), _INT32),
            "from_device": ((S,), _INT32),
            "num_draft_tokens": ((S,), _INT32),
            **{name: ((S,), dtype) for name, dtype in sampling.items()},
            "num_seqs": ((1,), _INT32),
        }
        fields, size = dict[str, Field](), 0
        for name, (shape, dtype) in shapes.items():
            fields[name] = Field(size, shape, dtype)
            size = fields[name].end
        return BatchLayout(
            bucket=bucket,
            fields=MappingProxyType(fields),
            offsets=Offsets(*(fields[name].offset for name in Offsets._fields)),
            sampling_names=tuple(sampling),
            sampling=Field(fields[next(iter(sampling))].offset, (len(sampling), S), _INT32),
            size=size,
        )

    def views(self, buffer: Any) -> dict[str, Any]:
        """The arrays that lie in `buffer` (int32[size]), of numpy or of JAX, by their names."""
        return {name: field.view(buffer) for name, field in self.fields.items()}
