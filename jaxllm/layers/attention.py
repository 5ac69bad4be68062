"""Attention over the paged cache: projections, optional QK-norm, rotation, kernel, output projection."""

from dataclasses import dataclass

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.kv_caches import LayerCache
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import Rotation, rotate
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.layers.weight_format import WeightFormats
from jaxllm.pallas_kernels.ragged_paged_attention import ragged_paged_attention, view_pages


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One layer's attention. `qk_norm_eps`: None for no QK-norm."""

    model_dim: int
    num_heads: int
    cache: CacheSpec
    sm_scale: float
    qkv_bias: bool = False
    qk_norm_eps: float | None = None
    unit_offset_norm: bool = False


class Attention(nnx.Module):
    """Split over heads. Q, K and V are three weights: parts of one would have to be cut out of its product."""

    def __init__(self, config: AttentionConfig, formats: WeightFormats):
        self.config = config
        D, K, H = config.model_dim, config.cache.num_kv_heads, config.cache.head_dim
        columns = PartitionSpec(None, "model")
        self.q = Linear(D, config.num_heads * H, formats["q"], columns, bias=config.qkv_bias)
        num_copies = config.cache.num_copies
        self.k = Linear(D, K * H, formats["k"], columns, bias=config.qkv_bias, num_copies=num_copies)
        self.v = Linear(D, K * H, formats["v"], columns, bias=config.qkv_bias, num_copies=num_copies)
        self.out = Linear(config.num_heads * H, D, formats["out"], PartitionSpec("model", None))
        self.q_norm = self._norm() if config.qk_norm_eps is not None else None
        self.k_norm = self._norm() if config.qk_norm_eps is not None else None

    def _norm(self) -> RMSNorm:
        config = self.config
        assert config.qk_norm_eps is not None
        return RMSNorm(config.cache.head_dim, eps=config.qk_norm_eps, unit_offset=config.unit_offset_norm)

    def __call__(
        self, x_TD: Array, rotation: Rotation, cache: LayerCache, metadata: StepMetadata
    ) -> tuple[Array, LayerCache]:
        """(output [T, D], the cache with this step's K and V)."""
        config = self.config
        shape = (x_TD.shape[0], -1, config.cache.head_dim)
        q_TNH, k_TKH, v_TKH = (project(x_TD).reshape(shape) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = rotate(q_TNH, rotation), rotate(k_TKH, rotation)
        out_TNH, cache = _attend(q_TNH, k_TKH, v_TKH, cache, metadata, config)
        return self.out(out_TNH.reshape(-1, config.num_heads * config.cache.head_dim)), cache


def _attend(
    q_TNH: Array, k_TKH: Array, v_TKH: Array, cache: LayerCache, metadata: StepMetadata, config: AttentionConfig
) -> tuple[Array, LayerCache]:
    """The kernel, on each device for the heads it holds."""
    implementation = metadata.implementation

    def kernel(q_TNH: Array, k_TKH: Array, v_TKH: Array, kv_pages: Array, *arrays: Array) -> tuple[Array, Array]:
        _, K, H = k_TKH.shape
        out_TNH, new_pages = ragged_paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            view_pages(kv_pages, cache.page_size, K, H, implementation),
            *arrays,
            sm_scale=config.sm_scale,
            sliding_window=config.cache.sliding_window,
            decode_only=metadata.decode_only,
            implementation=implementation,
        )
        return out_TNH, new_pages.reshape(kv_pages.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("model", 1) > 1:
        heads, pages, whole = PartitionSpec(None, "model"), PartitionSpec(None, "model"), PartitionSpec()
        kernel = jax.shard_map(
            kernel,
            in_specs=(heads, heads, heads, pages, whole, whole, whole, whole),
            out_specs=(heads, pages),
            check_vma=False,
        )
    out_TNH, kv_pages = kernel(
        q_TNH,
        k_TKH,
        v_TKH,
        cache.kv_pages,
        metadata.kv_lens_S,
        cache.page_table_SP,
        metadata.cu_q_lens,
        metadata.num_seqs,
    )
    return out_TNH, cache._replace(kv_pages=kv_pages)
