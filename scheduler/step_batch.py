"""A step as the device gets it: the plan in numpy, padded to a bucket, in one buffer."""

from functools import lru_cache

import numpy as np

from jaxllm.scheduler.batch_layout import BatchLayout
from jaxllm.scheduler.buckets import Bucket
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.step_plan import StepPlan


class StepBatch:
    """One step, padded to T tokens, S rows, and P pages of each group a row. Its arrays are views into `buffer`, made
    when asked for.

    Each step has a buffer of its own: a device on the host's memory may read it while the step is in flight.

    layout: of the buffer, for the bucket of the step.
    buffer: int32[n], all of the step's input.
    token_ids: int32[T]; 0 where the device fills in the token itself (`from_device`), and for padding.
    positions: int32[T], the place of each token in its sequence; 0 for padding.
    cu_q_lens: int32[S+1]. The tokens of row i are cu_q_lens[i] to cu_q_lens[i+1]; padding rows have none.
    kv_lens: int32[S], tokens whose keys and values are in the row's pages after this step; 0 for padding.
    page_table: int32[G, S, P], the pages of the row in each group of layers; the null page 0 after them, and in place
        of those that left the group's window.
    rows: int32[S], the row of the running table, and of the device's own state; max_num_seqs for padding.
    logits_rows: int32[S], the index among the T of the row's last token; 0 for padding.
    from_device: int32[S], 1 if the row's one token is what the device sampled for it last, else 0.
    num_draft_tokens: int32[S], how many of the row's last tokens are drafts to verify; 0 for padding.
    temperature, top_k and so on: each setting of `SamplingRow`, [S].
    num_seqs: int32[1], the number of rows that are not padding.
    """

    __slots__ = ("buffer", "layout")

    def __init__(self, layout: BatchLayout, buffer: np.ndarray) -> None:
        self.layout = layout
        self.buffer = buffer

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in self.layout.fields:
            raise AttributeError(f"a StepBatch has no array {name!r}")
        return self.layout.fields[name].view(self.buffer)

    @property
    def bucket(self) -> Bucket:
        return self.layout.bucket

    @classmethod
    def build(cls, plan: StepPlan, table: RunningTable, bucket: Bucket) -> "StepBatch":
        """The plan's step, from the table as `schedule` left it. The bucket must fit the plan."""
        num_seqs, num_tokens, rows = plan.num_seqs, plan.num_tokens, plan.rows
        assert bucket.fits(num_tokens, num_seqs, plan.max_q_len), f"{plan} does not fit {bucket}"
        T, S, P = bucket.num_tokens, bucket.num_seqs, table.page_table.shape[2]
        layout = BatchLayout.of(bucket, P, table.num_groups)
        at, buffer = layout.offsets, np.zeros(layout.size, np.int32)
        numbers_S = _numbers(S)
        q_lens = plan.num_scheduled_tokens

        if plan.is_decode_only:
            buffer[at.positions : at.positions + num_seqs] = plan.num_computed_tokens
            indices = table.first_token_index[rows] + plan.num_computed_tokens
            token_ids = buffer[at.token_ids : at.token_ids + num_seqs]
            np.multiply(table.flat_token_ids[indices], ~plan.from_device, out=token_ids)
            buffer[at.cu_q_lens + 1 : at.cu_q_lens + 1 + num_seqs] = numbers_S[1 : num_seqs + 1]
            buffer[at.logits_rows : at.logits_rows + num_seqs] = numbers_S[:num_seqs]
        else:
            q_ends = np.cumsum(q_lens, dtype=np.int32)
            positions = np.repeat(plan.num_computed_tokens - (q_ends - q_lens), q_lens)
            positions += _numbers(T)[:num_tokens]
            buffer[at.positions : at.positions + num_tokens] = positions
            indices = np.repeat(table.first_token_index[rows], q_lens) + positions
            token_ids = buffer[at.token_ids : at.token_ids + num_tokens]
            token_ids[:] = table.flat_token_ids[indices]
            token_ids[q_ends[plan.from_device] - 1] = 0
            buffer[at.cu_q_lens + 1 : at.cu_q_lens + 1 + num_seqs] = q_ends
            np.subtract(q_ends, 1, out=buffer[at.logits_rows : at.logits_rows + num_seqs])
        buffer[at.cu_q_lens + 1 + num_seqs : at.cu_q_lens + 1 + S] = num_tokens
        np.add(plan.num_computed_tokens, q_lens, out=buffer[at.kv_lens : at.kv_lens + num_seqs])
        num_pages, start = int(table.num_pages.max()), at.page_table
        for page_table_RP, first_page_R in zip(table.group_tables, table.first_page, strict=True):
            first = int(first_page_R[rows].min()) if table.has_windows else 0
            page_table_SP = buffer[start : start + S * P].reshape(S, P)
            page_table_SP[:num_seqs, first:num_pages] = page_table_RP[:, first:num_pages].take(rows, axis=0)
            start += S * P
        rows_S = buffer[at.rows : at.rows + S]
        rows_S[:num_seqs], rows_S[num_seqs:] = rows, table.num_rows
        table.sampling.take(rows_S, axis=1, out=layout.sampling.view(buffer), mode="clip")
        buffer[at.from_device : at.from_device + num_seqs] = plan.from_device
        if plan.num_draft_tokens is not None:
            buffer[at.num_draft_tokens : at.num_draft_tokens + num_seqs] = plan.num_draft_tokens
        buffer[at.num_seqs] = num_seqs
        return cls(layout, buffer)


@lru_cache(maxsize=256)
def _numbers(number: int) -> np.ndarray:
    """int32[number + 1]: 0, 1, 2 …"""
    numbers = np.arange(number + 1, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers
