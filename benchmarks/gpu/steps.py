"""The steps of attention that attention.py measures, and how each is laid out so that its reads reach memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.kernel_workload import Workload

HEADS = {  # Query heads, KV heads, size of a head.
    "llama-8b": (32, 8, 128),
    "llama-70b": (64, 8, 128),
    "qwen3-0.6b": (16, 8, 128),
    "qwen3-32b": (64, 8, 128),
}
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 4096, 32_768)
PROMPTS = (512, 1024, 2048, 4096, 8192, 16_384)
L2_BYTES = 50 << 20  # Of an H100 and an H200.
# What calls read between two reads of the same byte, in L2 caches: if eviction is not the oldest first, a part of
# about 1 / L2_TURNS may still be there. Where a call reads little, MAX_CALLS bounds how much comes together.
L2_TURNS = 32
MIN_CALLS, MAX_CALLS, PREFILL_CALLS = 8, 32, 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step, and where its keys and values lie.

    Attributes:
      num_calls: of the step in one round of a program, one after the other.
      num_places: disjoint parts of memory with the keys and values of a step, which the calls take in turn.
      pages_per_seq: columns of the page table; of decodes, room for the longest context that is measured, so that one
        program serves all.
      num_pages: of the pool: all places of the step that needs most, and the null page.
    """

    step: Workload
    num_calls: int
    num_places: int
    pages_per_seq: int
    num_pages: int

    @property
    def is_decode(self) -> bool:
        return self.step.q_len == 1

    @property
    def memory_bytes(self) -> int:
        """Of the pool, or of contiguous keys and values, with queries and outputs."""
        pool_bytes = self.num_pages * self.step.page_size * self.step.token_kv_bytes
        return max(pool_bytes, self.num_places * self.step.kv_bytes) + 2 * self.step.io_bytes


def decode_jobs(
    heads: tuple[int, int, int], batches: Sequence[int], contexts: Sequence[int], page_size: int
) -> Iterator[Job]:
    """Steps of one token for each of `batch` sequences."""
    for batch in batches:
        steps = [_step(heads, batch, 1, context, page_size) for context in contexts]
        least_bytes = min(step.kv_bytes for step in steps)
        num_calls = min(max(MIN_CALLS, -(-4 * L2_BYTES // least_bytes)), MAX_CALLS)
        places = [min(num_calls, -(-L2_TURNS * L2_BYTES // step.kv_bytes)) for step in steps]
        needs = [n * step.num_seqs * step.pages_per_seq for step, n in zip(steps, places, strict=True)]
        for step, num_places in zip(steps, places, strict=True):
            yield Job(
                step=step,
                num_calls=num_calls,
                num_places=num_places,
                pages_per_seq=max(step.pages_per_seq for step in steps),
                num_pages=1 + max(needs),
            )


def prefill_jobs(heads: tuple[int, int, int], prompts: Sequence[int], page_size: int) -> Iterator[Job]:
    """Steps of one whole prompt. They compute more than they read, so few places do."""
    for prompt in prompts:
        step = _step(heads, 1, prompt, prompt, page_size)
        yield Job(
            step=step,
            num_calls=PREFILL_CALLS,
            num_places=PREFILL_CALLS,
            pages_per_seq=step.pages_per_seq,
            num_pages=1 + PREFILL_CALLS * step.pages_per_seq,
        )


def _step(heads: tuple[int, int, int], num_seqs: int, q_len: int, kv_len: int, page_size: int) -> Workload:
    num_heads, num_kv_heads, head_dim = heads
    return Workload(
        num_seqs=num_seqs,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype="bfloat16",
        page_size=page_size,
    )
