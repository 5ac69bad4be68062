"""Attention in JAX as attention.py measures it: ours over pages, and what JAX has.

A child of attention.py (see jobs.py): `python -m benchmarks.gpu.jax_kernels SYSTEM JOBS_FILE`.

Queries and values are normal; keys are KEY_STD times as large. So softmax picks a few tokens, and outputs, which are
the next call's queries, keep their size: with queries that shrink to nothing all weights were 1, and a card multiplies
by equal numbers with less power, and so at a higher clock, than by those of a model.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.gpu.jobs import serve
from benchmarks.gpu.steps import Job
from benchmarks.gpu.timing import SAMPLES, Calls, Times, time_calls
from benchmarks.kernel_workload import Workload
from jaxllm.pallas_kernels.ragged_paged_attention import (
    KVCacheSpec,
    kv_cache_shape,
    pages_from_tokens,
    ragged_paged_attention,
)

KEY_STD = 16.0
NUM_DIFFERENT_PAGES = 256
NUM_SMS = 132

Variants = Iterator[tuple[str, Calls]]
"""Ways of one system to do the same, of which the fastest counts."""


@dataclass(frozen=True)
class Paged:
    """`ragged_paged_attention`, the write of the new tokens into their pages included."""

    implementation: str
    sm_scale: float
    decode_only: bool

    def __call__(self, q: Array, state: Any, common: Any, place: Any) -> tuple[Array, Any]:
        k_TKH, v_TKH, kv_lens_S, cu_q_lens, num_seqs = common
        return ragged_paged_attention(
            q,
            k_TKH,
            v_TKH,
            state,
            kv_lens_S,
            place,
            cu_q_lens,
            num_seqs,
            sm_scale=self.sm_scale,
            decode_only=self.decode_only,
            implementation=self.implementation,
        )


def paged(job: Job, implementation: str) -> Variants:
    step = job.step
    T, N, K, H = step.num_tokens, step.num_heads, step.num_kv_heads, step.head_dim
    spec = KVCacheSpec(
        num_pages=job.num_pages, page_size=step.page_size, num_kv_heads=K, head_dim=H, dtype=jnp.dtype(step.kv_dtype)
    )
    shape = kv_cache_shape(spec, implementation)
    common = (
        _normal((T, K, H), seed=1, std=KEY_STD),
        _normal((T, K, H), seed=2),
        jnp.full(step.num_seqs, step.kv_len, jnp.int32),
        jnp.arange(step.num_seqs + 1, dtype=jnp.int32) * step.q_len,
        jnp.array([step.num_seqs], jnp.int32),
    )
    calls = Calls(
        attend=Paged(implementation, H**-0.5, job.is_decode),
        q=_normal((T, N, H), seed=0),
        state=_cache(shape, step, implementation),
        common=common,
        places=[jnp.asarray(table_SP) for table_SP in page_tables(job)],
    )
    yield implementation, calls


def page_tables(job: Job) -> list[np.ndarray]:
    """int32[S, P] for each place: pages from anywhere in the pool, each in one place only; unused entries are 0."""
    step = job.step
    shape = (job.num_places, step.num_seqs, step.pages_per_seq)
    tables = np.zeros((*shape[:2], job.pages_per_seq), np.int32)
    pages = np.random.default_rng(0).permutation(job.num_pages - 1)[: np.prod(shape)] + 1
    tables[:, :, : step.pages_per_seq] = pages.reshape(shape)
    return list(tables)


@dataclass(frozen=True)
class Contiguous:
    """`jax.nn.dot_product_attention` of q [B, T, N, H] and a place's K and V [B, S, K, H]."""

    implementation: Literal["cudnn", "xla"]
    is_causal: bool

    def __call__(self, q: Array, state: Any, common: Any, place: Any) -> tuple[Array, Any]:
        k, v = place
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=self.is_causal, implementation=self.implementation
        ), state


def contiguous(job: Job, implementation: Literal["cudnn", "xla"]) -> Variants:
    step = job.step
    B, N, K, H = step.num_seqs, step.num_heads, step.num_kv_heads, step.head_dim
    places = [_contiguous_kv(step, seed) for seed in range(job.num_places)]
    shapes = {"heads": (B, step.q_len, N, H)}
    if job.is_decode:  # The heads of a KV head see the same, as rows of one head would.
        shapes["heads as rows"] = (B, N // K, K, H)
    for name, shape in shapes.items():
        yield (
            name,
            Calls(
                attend=Contiguous(implementation, is_causal=not job.is_decode),
                q=_normal(shape, seed=100),
                state=None,
                common=None,
                places=places,
            ),
        )


@dataclass(frozen=True)
class TritonPaged:
    """JAX's own kernel for decodes over pages, K and V apart: [K, page, page_size, H]."""

    pages_per_block: int
    num_splits: int

    def __call__(self, q: Array, state: Any, common: Any, place: Any) -> tuple[Array, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
        k_pages, v_pages, lens_S = common
        out = paged_attention(
            q,
            k_pages,
            v_pages,
            place,
            lens_S,
            pages_per_compute_block=self.pages_per_block,
            k_splits=self.num_splits,
        )
        return out.astype(q.dtype), state


def triton(job: Job) -> Variants:
    """Its page table has the columns that are in use, as each of its splits takes a part of them.

    It leaves out the usual factor of the scores, so that is in the keys.
    """
    step = job.step
    if not job.is_decode:
        raise ValueError("is for decodes")
    K, P = step.num_kv_heads, step.pages_per_seq
    page_shape = (step.page_size, step.head_dim)
    k_pages, v_pages = (
        _repeated(_normal((K, NUM_DIFFERENT_PAGES, *page_shape), seed=seed, std=std), job.num_pages, axis=1)
        for seed, std in ((1, KEY_STD * step.head_dim**-0.5), (2, 1.0))
    )
    places = [jnp.asarray(table_SP[:, :P]) for table_SP in page_tables(job)]
    # Two blocks for each SM or more, and parts of equal length.
    enough = [n for n in range(1, P + 1) if P % n == 0 and n * K * step.num_seqs >= 2 * NUM_SMS]
    num_splits = enough[0] if enough else P
    for pages_per_block in (1, 2):
        if P // num_splits % pages_per_block == 0:
            yield (
                f"{num_splits} splits, {pages_per_block} pages at a time",
                Calls(
                    attend=TritonPaged(pages_per_block, num_splits),
                    q=_normal((step.num_seqs, step.num_heads, step.head_dim), seed=0),
                    state=None,
                    common=(k_pages, v_pages, jnp.full(step.num_seqs, step.kv_len, jnp.int32)),
                    places=places,
                ),
            )


SYSTEMS: dict[str, Callable[[Job], Variants]] = {
    "gpu": partial(paged, implementation="gpu"),
    "xla": partial(paged, implementation="xla"),
    "cudnn": partial(contiguous, implementation="cudnn"),
    "triton": triton,
}


def measure(system: str, job: Job, *, samples: int = SAMPLES) -> dict[str, Any]:
    """Figures of the system's fastest variant, by the median, and the medians of all.

    Raises:
      Exception: of the last variant, if none runs.
    """
    times: dict[str, Times] = {}
    failure: Exception | None = None
    for name, calls in SYSTEMS[system](job):
        try:
            times[name] = time_calls(calls, job.num_calls, samples=samples)
        except Exception as error:  # The other ones may run.
            failure = error
    if failure is not None and not times:
        raise failure
    best = min(times, key=lambda name: times[name].median_s)
    return {**times[best].figures(), "variant": best, "variants_s": {name: t.median_s for name, t in times.items()}}


def _normal(shape: Sequence[int], *, seed: int, std: float = 1.0) -> Array:
    return std * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _cache(shape: tuple[int, ...], step: Workload, implementation: str) -> Array:
    """A pool in an implementation's own layout, in which some pages come again and again."""
    tokens = _normal((NUM_DIFFERENT_PAGES, step.page_size, 2, step.num_kv_heads, step.head_dim), seed=3) * jnp.array(
        [KEY_STD, 1.0], jnp.bfloat16
    ).reshape(2, 1, 1)
    cache = _repeated(pages_from_tokens(tokens, implementation), shape[0], axis=0)
    assert cache.shape == shape
    return cache


def _contiguous_kv(step: Workload, seed: int) -> tuple[Array, Array]:
    """K and V [B, S, K, H]; all sequences have the same in them, each in its own memory."""
    shape = (1, step.kv_len, step.num_kv_heads, step.head_dim)
    k, v = _normal(shape, seed=2 * seed, std=KEY_STD), _normal(shape, seed=2 * seed + 1)
    return _repeated(k, step.num_seqs, axis=0), _repeated(v, step.num_seqs, axis=0)


@partial(jax.jit, static_argnames=("size", "axis"))
def _repeated(x: Array, size: int, *, axis: int) -> Array:
    return jnp.take(x, jnp.arange(size) % x.shape[axis], axis=axis)


def main() -> None:
    system, jobs_file = sys.argv[1:]
    # Compiled programs of another run were tuned by another compiler perhaps.
    jax.config.update("jax_enable_compilation_cache", False)

    def run(job: dict[str, Any]) -> dict[str, Any]:
        samples = job.pop("samples")
        return measure(system, Job(**{**job, "step": Workload(**job["step"])}), samples=samples)

    serve(run, jobs_file)


if __name__ == "__main__":
    main()
