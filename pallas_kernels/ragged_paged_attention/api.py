"""The public call of ragged paged attention: checks its arguments once and picks an implementation.

An implementation is a module of this package, imported when it is used, with functions of the names that are public
here: `kv_cache_shape(num_pages, page_size, num_kv_heads, head_dim, dtype)`, `pages_from_tokens(kv_BC2KH)`,
`tokens_from_pages(kv_pages, num_kv_heads, head_dim)` and `ragged_paged_attention`. What is beyond it alone, such as a
size of head, its `validate(q_TNH, k_TKH, kv_pages, page_table_SP)` refuses with a ValueError, if it has one.

"gpu" has the pages of "xla", which stands in for it where nobody has asked for one of them: on GPUs that its kernels
are not made for, and for what they cannot do.
"""

import importlib
from dataclasses import dataclass
from functools import partial
from math import prod
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.pallas_kernels.ragged_paged_attention import gpu_card

IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu")
KV_DTYPES = tuple(jnp.dtype(t) for t in ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"))


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer's KV cache holds. `num_pages` counts page 0, the null page that belongs to no sequence."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype


def default_implementation() -> str:
    """What fits the devices of the mesh that is set, described ones included, or else JAX's default backend.

    On a GPU that is not NVIDIA's Hopper, "xla"; the log says so once.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform == "tpu" or (platform == "gpu" and gpu_card.is_hopper()):
        return platform
    if platform == "gpu":
        gpu_card.say_that_xla_runs(f"it needs compute capability 9.0 (H100, H200), and this is {gpu_card.name()}")
    return "xla"


def kv_cache_shape(spec: KVCacheSpec, implementation: str | None = None) -> tuple[int, ...]:
    """Shape of one layer's cache array. Axis 0 is the page, axis 1 the one to shard by heads; the rest is private."""
    module = _module(implementation)
    return module.kv_cache_shape(spec.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim, spec.dtype)


def check_support(
    spec: KVCacheSpec,
    *,
    num_heads: int,
    q_dtype: jnp.dtype,
    max_seqs: int,
    max_pages_per_seq: int,
    implementation: str | None = None,
) -> str:
    """The implementation that will do it, asked before there is any array: that which is named, or the default.

    Raises ValueError for what it could not do later.
    """
    return _supporting(
        implementation,
        jax.ShapeDtypeStruct((1, num_heads, spec.head_dim), q_dtype),
        jax.ShapeDtypeStruct((1, spec.num_kv_heads, spec.head_dim), q_dtype),
        jax.ShapeDtypeStruct(kv_cache_shape(spec, implementation), spec.dtype),
        jax.ShapeDtypeStruct((max_seqs, max_pages_per_seq), jnp.int32),
    )


def pages_from_tokens(kv_BC2KH: Array, implementation: str | None = None) -> Array:
    """Pages in the private layout, dtype kept, from the K and V of each of their C = page_size slots.

    With `tokens_from_pages` it moves a cache between implementations: an array of some pages, along axis 0.
    """
    if kv_BC2KH.ndim != 5 or kv_BC2KH.shape[2] != 2:
        raise ValueError(f"kv_BC2KH has shape {kv_BC2KH.shape}; expected [pages, page_size, 2, K, H]")
    return _module(implementation).pages_from_tokens(kv_BC2KH)


def tokens_from_pages(kv_pages: Array, num_kv_heads: int, head_dim: int, implementation: str | None = None) -> Array:
    """The inverse of `pages_from_tokens`: [pages, page_size, 2, K, H]."""
    return _module(implementation).tokens_from_pages(kv_pages, num_kv_heads, head_dim)


def view_pages(
    kv_pages: Array, page_size: int, num_kv_heads: int, head_dim: int, implementation: str | None = None
) -> Array:
    """A cache array seen as pages for such heads: r to one, page p being the pages p * r to p * r + r - 1.

    So layers with different heads can share an array. Nothing is moved. Raises ValueError where something would have to
    be, and where a page is not made up of a whole number of the new ones.
    """
    spec = KVCacheSpec(
        num_pages=1, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=kv_pages.dtype
    )
    _, *page_shape = kv_cache_shape(spec, implementation)
    if prod(kv_pages.shape[1:]) % prod(page_shape):
        raise ValueError(f"a page of shape {kv_pages.shape[1:]} is not made up of pages of shape {tuple(page_shape)}")
    is_tiled = (implementation or default_implementation()) == "tpu"
    if is_tiled and kv_pages.shape[2:] != tuple(page_shape[1:]):
        raise ValueError(
            f"a page of shape {kv_pages.shape[1:]} can only be copied to pages of shape {tuple(page_shape)}: "
            "on a TPU the last two axes lie in tiles"
        )
    return kv_pages.reshape(-1, *page_shape)


@partial(
    jax.jit, static_argnames=("sm_scale", "sliding_window", "soft_cap", "decode_only", "implementation")
)  # Inside a program of many layers: traced and lowered once, not once for each.
def ragged_paged_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    kv_pages: Array,
    kv_lens_S: Array,
    page_table_SP: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    decode_only: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Causal attention of any mix of decodes, prompt chunks and multi-token rows over a paged KV cache.

    Row s of the step holds the tokens `cu_q_lens[s] : cu_q_lens[s+1]`, the last ones of a sequence of
    `kv_lens_S[s]` tokens. Their K and V are first written into the pages, then each token attends to every
    earlier token of its sequence and itself.

    Args:
      q_TNH: queries, float; rows beyond `cu_q_lens[num_seqs]` are padding. N is a multiple of K; query head n
        reads KV head n // G.
      k_TKH, v_TKH: the new keys and values, float.
      kv_pages: one layer's cache, of `kv_cache_shape`; donate it: it is updated in place.
      kv_lens_S: int32, tokens of each sequence including those of this step; ignored for rows >= num_seqs.
      page_table_SP: int32, `page_table_SP[s, p]` holds positions `p * page_size ...` of sequence s.
      cu_q_lens: int32[S+1], cumulative number of tokens of the rows; constant after the last real row.
      num_seqs: int32[1], how many rows are real.
      sm_scale: factor of the scores, usually H ** -0.5.
      sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks_N: float32, one more logit per query head that takes probability but has no value.
      k_scale, v_scale: float32 scalars or [K]; the cache holds `k / k_scale`. For int8 and fp8 caches.
      decode_only: a static promise that every real row has one token, so that row s is token s, and T = S. It leaves
        the code for chunks out of the program.
      implementation: one of IMPLEMENTATIONS; None picks by `default_implementation`, and "xla" for what the kernels
        for GPUs cannot do.

    Returns:
      (out_TNH in q's dtype, zero in padding rows; the updated kv_pages).

    Raises:
      ValueError: shapes or dtypes do not fit each other, an option is out of range, or the implementation that is
        asked for cannot do this, or not here.
    """
    _validate(q_TNH, k_TKH, v_TKH, kv_pages, kv_lens_S, page_table_SP, cu_q_lens, num_seqs)
    num_kv_heads = k_TKH.shape[1]
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; it must be at least 1, or None for full attention")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap")
    if decode_only and q_TNH.shape[0] != kv_lens_S.shape[0]:
        raise ValueError(f"decode_only needs as many tokens as rows; got T={q_TNH.shape[0]}, S={kv_lens_S.shape[0]}")
    if sinks_N is not None and sinks_N.shape != q_TNH.shape[1:2]:
        raise ValueError(f"sinks_N has shape {sinks_N.shape}; expected ({q_TNH.shape[1]},), one per query head")
    k_scale_K, v_scale_K = _scale(k_scale, "k_scale", num_kv_heads), _scale(v_scale, "v_scale", num_kv_heads)
    module = _module(_supporting(implementation, q_TNH, k_TKH, kv_pages, page_table_SP))
    return module.ragged_paged_attention(
        q_TNH,
        k_TKH,
        v_TKH,
        kv_pages,
        kv_lens_S,
        page_table_SP,
        cu_q_lens,
        num_seqs,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks_N=sinks_N,
        k_scale_K=k_scale_K,
        v_scale_K=v_scale_K,
        decode_only=decode_only,
    )


def _module(implementation: str | None) -> ModuleType:
    name = implementation or default_implementation()
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {name!r} is not known; choose one of {', '.join(IMPLEMENTATIONS)}")
    return importlib.import_module(f"{__package__}.{name}")


def _supporting(implementation: str | None, *arrays: Array | jax.ShapeDtypeStruct) -> str:
    """The implementation to take for such (q_TNH, k_TKH, kv_pages, page_table_SP), as `check_support` says."""
    name = implementation or default_implementation()
    module = _module(name)
    try:
        if hasattr(module, "validate"):
            module.validate(*arrays)
    except ValueError as error:
        if implementation is not None or name != "gpu":
            raise
        gpu_card.say_that_xla_runs(str(error))
        return "xla"
    if name == "gpu":
        gpu_card.require_hopper()
    return name


def _scale(scale: Array | float | None, name: str, num_kv_heads: int) -> Array | None:
    if scale is None:
        return None
    scale = jnp.asarray(scale, jnp.float32)
    if scale.shape not in ((), (num_kv_heads,)):
        raise ValueError(f"{name} has shape {scale.shape}; expected a scalar or ({num_kv_heads},), one per KV head")
    return jnp.broadcast_to(scale, (num_kv_heads,))


def _validate(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    kv_pages: Array,
    kv_lens_S: Array,
    page_table_SP: Array,
    cu_q_lens: Array,
    num_seqs: Array,
) -> None:
    if q_TNH.ndim != 3 or k_TKH.ndim != 3:
        raise ValueError(f"q and k must have shapes [T, N, H] and [T, K, H]; got {q_TNH.shape} and {k_TKH.shape}")
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    if k_TKH.shape != (T, K, H) or v_TKH.shape != (T, K, H):
        raise ValueError(f"k {k_TKH.shape} and v {v_TKH.shape} must both be [T, K, H] with T={T}, H={H} as in q")
    for name, array in (("q_TNH", q_TNH), ("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}; expected a float, such as bfloat16")
    if K == 0 or N % K:
        raise ValueError(f"q has {N} heads; it must be a multiple of the {K} KV heads")
    if page_table_SP.ndim != 2:
        raise ValueError(f"page_table_SP has shape {page_table_SP.shape}; expected [S, P]")
    S = page_table_SP.shape[0]
    for name, array, shape in (
        ("kv_lens_S", kv_lens_S, (S,)),
        ("cu_q_lens", cu_q_lens, (S + 1,)),
        ("num_seqs", num_seqs, (1,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; expected {shape} for {S} rows of the page table")
    for name, array in (
        ("kv_lens_S", kv_lens_S),
        ("page_table_SP", page_table_SP),
        ("cu_q_lens", cu_q_lens),
        ("num_seqs", num_seqs),
    ):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}; expected int32")
    if kv_pages.dtype not in KV_DTYPES:
        raise ValueError(f"kv_pages is {kv_pages.dtype}; expected one of {', '.join(map(str, KV_DTYPES))}")
    if kv_pages.ndim < 3:
        raise ValueError(f"kv_pages has shape {kv_pages.shape}; make it with kv_cache_shape")
