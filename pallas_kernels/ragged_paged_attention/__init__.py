"""Attention over a paged KV cache for ragged batches: prompt chunks, decodes and multi-token rows in one call."""

from jaxllm.pallas_kernels.ragged_paged_attention.api import (
    KVCacheSpec,
    check_support,
    default_implementation,
    kv_cache_shape,
    pages_from_tokens,
    ragged_paged_attention,
    tokens_from_pages,
    view_pages,
)

__all__ = [
    "KVCacheSpec",
    "check_support",
    "default_implementation",
    "kv_cache_shape",
    "pages_from_tokens",
    "ragged_paged_attention",
    "tokens_from_pages",
    "view_pages",
]
