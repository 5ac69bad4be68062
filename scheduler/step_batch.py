"""A step as the device gets it: the plan in numpy, padded to a bucket, in one buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType

import numpy as np

from jaxllm.scheduler.buckets import Bucket
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.step_plan import StepPlan

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Field:
    """Where an array lies in the buffer: `shape` elements of `dtype` (of 4 bytes), from element `offset`."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)

    def view(self, buffer: np.ndarray) -> np.ndarray:
        """The array, in the memory of `buffer` (int32)."""
        return buffer[self.offset : self.end].view(self.dtype).reshape(self.shape)


@lru_cache(maxsize=256)
def fields(bucket: Bucket, max_pages_per_seq: int) -> Mapping[str, Field]:
    """The layout of the buffer, in order and without gaps: for the builder, and for who unpacks it.

    The names and meanings are those of `StepBatch`.
    """
    T, S, P = bucket.num_tokens, bucket.num_seqs, max_pages_per_seq
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "token_ids": ((T,), _INT32),
        "positions": ((T,), _INT32),
        "cu_q_lens": ((S + 1,), _INT32),
        "kv_lens": ((S,), _INT32),
        "page_table": ((S, P), _INT32),
        "rows": ((S,), _INT32),
        "logits_rows": ((S,), _INT32),
        "from_device": ((S,), _INT32),
        "temperature": ((S,), _FLOAT32),
        "top_k": ((S,), _INT32),
        "top_p": ((S,), _FLOAT32),
        "min_p": ((S,), _FLOAT32),
        "seed": ((S,), _INT32),
        "num_seqs": ((1,), _INT32),
    }
    layout, offset = {}, 0
    for name, (shape, dtype) in shapes.items():
        layout[name] = Field(offset, shape, dtype)
        offset = layout[name].end
    return MappingProxyType(layout)


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One step, padded to T tokens, S rows and P pages a row. All arrays are views into `buffer`.

    Each step has a buffer of its own: a device on the host's memory may read it while the step is in flight.

    bucket: the T and S of the padding.
    buffer: int32[n], all of the step's input, laid out by `fields`.
    token_ids: int32[T]; 0 where the device fills in the token itself (`from_device`), and for padding.
    positions: int32[T], the place of each token in its sequence; 0 for padding.
    cu_q_lens: int32[S+1]. The tokens of row i are cu_q_lens[i] to cu_q_lens[i+1]; padding rows have none.
    kv_lens: int32[S], tokens whose keys and values are in the row's pages after this step; 0 for padding.
    page_table: int32[S, P], the pages of the row; the null page 0 after them.
    rows: int32[S], the row of the running table, and of the device's own state; max_num_seqs for padding.
    logits_rows: int32[S], the index among the T of the row's last token; 0 for padding.
    from_device: int32[S], 1 if the row's one token is what the device sampled for it last, else 0.
    temperature, top_p, min_p: float32[S]; top_k: int32[S]. See `SamplingRow`; greedy for padding.
    seed: int32[S], the bits of a uint32.
    num_seqs: int32[1], the number of rows that are not padding.
    """

    bucket: Bucket
    buffer: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray
    rows: np.ndarray
    logits_rows: np.ndarray
    from_device: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    num_seqs: np.ndarray

    @classmethod
    def empty(cls, bucket: Bucket, table: RunningTable) -> "StepBatch":
        """A batch of padding only."""
        layout = fields(bucket, table.page_table.shape[1])
        buffer = np.zeros(layout["num_seqs"].end, np.int32)
        arrays = {name: field.view(buffer) for name, field in layout.items()}
        batch = cls(bucket=bucket, buffer=buffer, **arrays)
        batch.rows.fill(table.num_rows)
        batch.top_p.fill(1.0)
        return batch

    @classmethod
    def build(cls, plan: StepPlan, table: RunningTable, bucket: Bucket) -> "StepBatch":
        """The plan's step, from the table as `schedule` left it. The bucket must fit the plan."""
        num_seqs, num_tokens, rows = plan.num_seqs, plan.num_tokens, plan.rows
        assert bucket.fits(num_tokens, num_seqs, plan.is_decode_only), f"{plan} does not fit {bucket}"
        batch = cls.empty(bucket, table)
        q_lens = plan.num_scheduled_tokens
        q_ends = np.cumsum(q_lens, dtype=np.int32)

        positions = np.repeat(plan.num_computed_tokens - (q_ends - q_lens), q_lens)
        positions += np.arange(num_tokens, dtype=np.int32)
        batch.positions[:num_tokens] = positions
        batch.token_ids[:num_tokens] = table.token_ids[np.repeat(rows, q_lens), positions]
        batch.token_ids[q_ends[plan.from_device] - 1] = 0

        batch.cu_q_lens[1 : num_seqs + 1] = q_ends
        batch.cu_q_lens[num_seqs + 1 :] = num_tokens
        batch.kv_lens[:num_seqs] = plan.num_computed_tokens + q_lens
        num_pages = table.num_pages[rows].max()
        batch.page_table[:num_seqs, :num_pages] = table.page_table[rows, :num_pages]
        batch.rows[:num_seqs] = rows
        batch.logits_rows[:num_seqs] = q_ends - 1
        batch.from_device[:num_seqs] = plan.from_device
        batch.temperature[:num_seqs] = table.temperature[rows]
        batch.top_k[:num_seqs] = table.top_k[rows]
        batch.top_p[:num_seqs] = table.top_p[rows]
        batch.min_p[:num_seqs] = table.min_p[rows]
        batch.seed[:num_seqs] = table.seed[rows].view(np.int32)
        batch.num_seqs[0] = num_seqs
        return batch
