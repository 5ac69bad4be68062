"""A script for `compile_in_child`: attention for each (card, options) of its argument. See test_gpu_compile."""

import json
import re
import sys
from dataclasses import asdict

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.pallas_kernels.gpu_target import CARDS, compile_with_figures, gpu_mesh
from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape, ragged_paged_attention

NUM_SEQS, PAGES_PER_SEQ, NUM_PAGES, NUM_CHUNK_TOKENS = 32, 64, 512, 1024


def compile_attention(
    card: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 64,
    q_dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    has_sinks: bool = False,
    decode_only: bool = False,
    num_devices: int = 1,
    **options: float,
) -> dict:
    mesh = gpu_mesh(card, num_devices)
    whole, heads = PartitionSpec(), PartitionSpec(None, "model")

    def struct(dtype: str, *shape: int, spec: PartitionSpec = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    kv_dtype = kv_dtype or q_dtype
    T = NUM_SEQS if decode_only else NUM_CHUNK_TOKENS
    spec = KVCacheSpec(
        num_pages=NUM_PAGES,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(kv_dtype),
    )
    new_tokens = struct(q_dtype, T, num_kv_heads, head_dim, spec=heads)
    arrays: dict[str, jax.ShapeDtypeStruct] = {"sinks_N": struct("float32", num_heads)} if has_sinks else {}
    if kv_dtype != q_dtype:
        arrays |= {name: struct("float32", num_kv_heads) for name in ("k_scale", "v_scale")}

    def attend(*positional: Array, **keyword: Array) -> tuple[Array, Array]:
        return ragged_paged_attention(
            *positional,
            **keyword,
            sm_scale=head_dim**-0.5,
            decode_only=decode_only,
            implementation="gpu",
            **options,
        )

    with jax.set_mesh(mesh):
        if num_devices > 1:
            in_specs, out_specs = (heads,) * 4 + (whole,) * 4, (heads, heads)
            attend = jax.shard_map(attend, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        lowered = jax.jit(attend, donate_argnums=3).lower(
            struct(q_dtype, T, num_heads, head_dim, spec=heads),
            new_tokens,
            new_tokens,
            struct(kv_dtype, *kv_cache_shape(spec, "gpu"), spec=heads),
            struct("int32", NUM_SEQS),
            struct("int32", NUM_SEQS, PAGES_PER_SEQ),
            struct("int32", NUM_SEQS + 1),
            struct("int32", 1),
            **arrays,
        )
        compiled, kernels = compile_with_figures(lowered)
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    num_pages, num_tiles, *tile = kv_cache_shape(spec, "gpu")
    pages = ",".join(map(str, (num_pages, num_tiles // num_devices, *tile)))
    return {
        "kernels": {k.name: asdict(k) | {"blocks_per_sm": k.blocks_per_sm(CARDS[card])} for k in kernels},
        "aliased_bytes": memory.alias_size_in_bytes,
        "cache_bytes": spec.num_pages * num_tiles // num_devices * page_size * head_dim * spec.dtype.itemsize,
        "collectives": re.findall(r"\b(?:all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", hlo),
        "copies_of_pages": re.findall(rf"\[{pages}\]\S* (?:copy|fusion)\(.*", hlo),
        # Where queries or results are laid out anew, they are read and written once more.
        "copies_of_tokens": re.findall(rf"\[{T},\d+,{head_dim}\]\S* copy\(.*", hlo),
    }


if __name__ == "__main__":
    print(json.dumps([compile_attention(card, **options) for card, options in json.loads(sys.argv[1])]))
