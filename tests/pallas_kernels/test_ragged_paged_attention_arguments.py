"""Arguments that do not fit are refused, with the value and what would fit, before anything is lowered."""

import dataclasses
import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest

from jaxllm.pallas_kernels.ragged_paged_attention import (
    KVCacheSpec,
    check_support,
    default_implementation,
    kv_cache_shape,
    pages_from_tokens,
    ragged_paged_attention,
)
from jaxllm.pallas_kernels.ragged_paged_attention.api import IMPLEMENTATIONS

H200 = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu"))


def trace(
    implementation: str,
    *,
    num_tokens=32,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    page_size=32,
    pages_per_seq=4,
    num_rows=6,
    kv_dtype="bfloat16",
    **changes,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a call gives for arguments of such sizes. `changes` replace arrays, given as (shape, dtype), and options."""
    spec = KVCacheSpec(
        num_pages=30, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=jnp.dtype(kv_dtype)
    )
    new_tokens = ((num_tokens, num_kv_heads, head_dim), "bfloat16")
    arrays = {
        "q_TNH": ((num_tokens, num_heads, head_dim), "bfloat16"),
        "k_TKH": new_tokens,
        "v_TKH": new_tokens,
        "kv_pages": (kv_cache_shape(spec, implementation if implementation in IMPLEMENTATIONS else "xla"), kv_dtype),
        "kv_lens_S": ((num_rows,), "int32"),
        "page_table_SP": ((num_rows, pages_per_seq), "int32"),
        "cu_q_lens": ((num_rows + 1,), "int32"),
        "num_seqs": ((1,), "int32"),
    }
    options = {"sm_scale": 0.1, "implementation": implementation}
    for name, value in changes.items():
        (arrays if name in arrays else options)[name] = value
    structs = [jax.ShapeDtypeStruct(*array) for array in arrays.values()]
    with jax.sharding.use_abstract_mesh(H200) if implementation == "gpu" else nullcontext():
        return jax.eval_shape(functools.partial(ragged_paged_attention, **options), *structs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_fits_is_taken(implementation):
    out_TNH, kv_pages = trace(implementation)
    assert (out_TNH.shape, out_TNH.dtype) == ((32, 8, 128), jnp.bfloat16)
    assert (kv_pages.shape[0], kv_pages.dtype) == (30, jnp.bfloat16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_TNH": ((32, 8 * 128), "bfloat16")}, r"q and k must have shapes .*; got \(32, 1024\)"),
        ({"q_TNH": ((32, 5, 128), "bfloat16")}, "q has 5 heads; it must be a multiple of the 2 KV heads"),
        ({"q_TNH": ((32, 8, 128), "int32")}, "q_TNH is int32; expected a float"),
        ({"k_TKH": ((32, 2, 64), "bfloat16")}, r"k \(32, 2, 64\) and v .* must both be \[T, K, H\] with T=32, H=128"),
        ({"v_TKH": ((31, 2, 128), "bfloat16")}, r"v \(31, 2, 128\) must both be \[T, K, H\]"),
        ({"v_TKH": ((32, 2, 128), "int8")}, "v_TKH is int8; expected a float"),
        ({"kv_pages": ((30, 4, 32, 128), "int16")}, "kv_pages is int16; expected one of float32, bfloat16"),
        ({"kv_pages": ((30, 2, 32, 128), "bfloat16")}, r"kv_pages has shape \(30, 2, 32, 128\); .*\b4, .*128"),
        ({"kv_pages": ((30, 4, 32, 256), "bfloat16")}, r"kv_pages has shape \(30, 4, 32, 256\); .*128"),
        ({"kv_pages": ((30, 32, 128), "bfloat16")}, r"kv_pages has shape \(30, 32, 128\); .*128"),
        ({"kv_pages": ((30, 128), "bfloat16")}, r"kv_pages has shape \(30, 128\); make it with kv_cache_shape"),
        ({"kv_lens_S": ((5,), "int32")}, r"kv_lens_S has shape \(5,\); expected \(6,\) for 6 rows"),
        ({"cu_q_lens": ((6,), "int32")}, r"cu_q_lens has shape \(6,\); expected \(7,\) for 6 rows"),
        ({"num_seqs": ((), "int32")}, r"num_seqs has shape \(\); expected \(1,\)"),
        ({"page_table_SP": ((24,), "int32")}, r"page_table_SP has shape \(24,\); expected \[S, P\]"),
        ({"page_table_SP": ((6, 4), "int16")}, "page_table_SP is int16; expected int32"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1, or None"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; it must be positive, or None"),
        ({"decode_only": True}, "decode_only needs as many tokens as rows; got T=32, S=6"),
        ({"sinks_N": jnp.zeros(3)}, r"sinks_N has shape \(3,\); expected \(8,\), one per query head"),
        ({"k_scale": jnp.zeros(3)}, r"k_scale has shape \(3,\); expected a scalar or \(2,\), one per KV head"),
        ({"v_scale": jnp.zeros((2, 1))}, r"v_scale has shape \(2, 1\); expected a scalar or \(2,\)"),
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)
def test_what_does_not_fit_is_named_with_what_would(change, message, implementation):
    with pytest.raises(ValueError, match=message):
        trace(implementation, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 320}, "head size is 320; the TPU kernel takes at most 256"),
        ({"num_heads": 64}, "32 query heads share a KV head; the TPU kernel takes at most 16"),
        ({"page_size": 8}, "page_size is 8; .*bfloat16 the TPU kernel takes 16, 32, 64, 128, 256"),
        ({"page_size": 48}, "page_size is 48; .*bfloat16 the TPU kernel takes 16, 32, 64, 128, 256"),
        ({"page_size": 16, "kv_dtype": "int8"}, "page_size is 16; .*int8 the TPU kernel takes 32, 64, 128, 256"),
        ({"kv_dtype": "float16"}, "kv_pages is float16; the TPU kernel takes float32, bfloat16, int8"),
        ({"q_TNH": ((32, 8, 128), "float16")}, "q is float16; the TPU kernel takes float32 and bfloat16"),
        ({"pages_per_seq": 2**20}, "table has 1,048,576 pages for each sequence; the TPU kernel takes at most 16,384"),
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)
def test_what_is_beyond_the_tpu_kernel_is_named_with_its_limit(change, message):
    with pytest.raises(ValueError, match=message):
        trace("tpu", **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head size is 80; the GPU kernel takes 64, 128, 256"),
        ({"num_heads": 64}, "32 query heads share a KV head; the GPU kernel takes at most 16"),
        ({"page_size": 8}, "page_size is 8; the GPU kernel takes 16, 32, 64, 128, 256"),
        ({"page_size": 48}, "page_size is 48; the GPU kernel takes 16, 32, 64, 128, 256"),
        ({"kv_dtype": "float16"}, "kv_pages is float16; with queries in bfloat16 the GPU kernel takes bfloat16, int8"),
        ({"kv_dtype": "float32"}, "kv_pages is float32; with queries in bfloat16 the GPU kernel takes bfloat16, int8"),
        ({"q_TNH": ((32, 8, 128), "float32")}, "q is float32; the GPU kernel takes bfloat16 and float16"),
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)
def test_what_is_beyond_the_gpu_kernel_is_named_with_its_limit(change, message):
    with pytest.raises(ValueError, match=message):
        trace("gpu", **change)


def test_support_can_be_asked_for_before_there_are_arrays():
    spec = KVCacheSpec(num_pages=8, page_size=48, num_kv_heads=2, head_dim=128, dtype=jnp.dtype("bfloat16"))
    ask = functools.partial(check_support, num_heads=8, q_dtype=jnp.dtype("bfloat16"), max_seqs=4, max_pages_per_seq=16)
    with pytest.raises(ValueError, match=r"page_size is 48; .*the TPU kernel takes 16, 32, 64, 128, 256"):
        ask(spec, implementation="tpu")
    ask(spec, implementation="xla")
    ask(dataclasses.replace(spec, page_size=64), implementation="tpu")


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation 'cuda' is not known; choose one of reference, xla, tpu, gpu"):
        trace("cuda")


def test_tokens_of_another_shape_are_no_pages():
    with pytest.raises(
        ValueError, match=r"kv_BC2KH has shape \(3, 32, 4, 128\); expected \[pages, page_size, 2, K, H\]"
    ):
        pages_from_tokens(jnp.zeros((3, 32, 4, 128)), "xla")


def test_the_mesh_decides_which_implementation_is_the_default():
    assert default_implementation() == "xla"
    for platform, implementation in (("tpu", "tpu"), ("cpu", "xla"), ("gpu", "xla")):
        device = jax.sharding.AbstractDevice("any", None, platform)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            assert default_implementation() == implementation
