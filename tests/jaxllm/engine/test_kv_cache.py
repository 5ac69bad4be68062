import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jaxllm.engine.kv_cache import (
    KVCacheLayout,
    MemoryBudget,
    host_memory_bytes,
    memory_limit_bytes,
)
from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape

SPEC = CacheSpec(num_kv_heads=2, head_dim=16)


def layout(dtype="float32", specs=(SPEC,) * 3, page_size=8, implementation=None):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return KVCacheLayout.of(
        specs, 1024, page_size=page_size, dtype=jnp.dtype(dtype), implementation=implementation, mesh=mesh
    )


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_page_takes_the_bytes_of_its_keys_and_values_in_every_array(dtype, itemsize):
    page_bytes = layout(dtype).page_bytes()
    assert page_bytes == 3 * 2 * 2 * 8 * 16 * itemsize
    arrays = layout(dtype).allocate(5)
    assert sum(array.nbytes for array in arrays) == 5 * page_bytes


def test_there_are_as_many_arrays_of_zeros_as_a_group_has_layers():
    arrays = layout().allocate(5)
    spec = KVCacheSpec(num_pages=5, page_size=8, num_kv_heads=2, head_dim=16, dtype=jnp.dtype("float32"))
    assert [array.shape for array in arrays] == [kv_cache_shape(spec)] * 3
    assert not any(array.any() for array in arrays)
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == 3
    assert all(array.sharding == struct.sharding for array, struct in zip(arrays, layout().structs(5), strict=True))


def choose(layout):
    return layout.choose_implementation(num_heads=4, q_dtype=jnp.dtype("float32"), max_seqs=4, max_pages_per_seq=8)


def test_layers_that_keep_different_things_see_pages_of_one_array():
    small, large = CacheSpec(num_kv_heads=2, head_dim=16), CacheSpec(num_kv_heads=4, head_dim=32)
    (array,) = layout(specs=(small,) * 3 + (large,)).allocate(5)
    assert array.shape == (5, 4 * 4, 8, 16)
    chosen = choose(layout(specs=(small,) * 3 + (large,)))
    assert chosen.implementation == "xla"
    assert chosen.page_bytes() == array.nbytes // 5


def test_on_a_tpu_heads_that_fill_other_tiles_are_refused():
    def specs(*head_dims):
        return [CacheSpec(num_kv_heads=2, head_dim=head_dim) for head_dim in head_dims]

    choose(layout(specs=specs(64, 128), page_size=16, implementation="tpu"))
    with pytest.raises(
        ConfigError, match=r"attention: .* can only be copied .*: on a TPU the last two axes lie in tiles"
    ):
        choose(layout(specs=specs(128, 256), page_size=16, implementation="tpu"))


BUDGET = MemoryBudget(limit_bytes=1_000_000_000, weights_bytes=600_000_000, temporaries_bytes=150_000_000)


def test_pages_fill_what_weights_and_programs_leave():
    assert BUDGET.num_pages(2_000_000, at_least=1, at_most=10**6) == 125
    assert BUDGET.num_pages(2_000_001, at_least=1, at_most=10**6) == 124
    assert BUDGET.num_pages(2_000_000, at_least=125, at_most=10**6) == 125
    assert BUDGET.num_pages(2_000_000, at_least=1, at_most=100) == 100


@pytest.mark.parametrize(
    ("weights_bytes", "left"), [(600_000_000, "250 MB are left"), (999_000_000, "and 0 MB are left")]
)
def test_too_few_pages_are_refused_with_the_arithmetic(weights_bytes, left):
    budget = MemoryBudget(limit_bytes=1_000_000_000, weights_bytes=weights_bytes, temporaries_bytes=150_000_000)
    with pytest.raises(OutOfMemoryError) as refusal:
        budget.num_pages(2_000_000, at_least=126, at_most=10**6)
    for part in (
        "at least 126 pages of 2.00 MB",
        left,
        "of 1,000 MB, ",
        f"weights take {weights_bytes / 1e6:,.0f} MB and programs 150 MB",
        "Lower max_model_len or max_num_batched_tokens, raise memory_utilization, or ",
        "tensor_parallel_size",
    ):
        assert part in str(refusal.value)


def test_the_limit_is_a_part_of_the_device_or_on_cpu_of_the_host_beside_the_weights():
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 80_000_000_000})
    assert memory_limit_bytes(device, 0.9, 10_000_000_000) == 72_000_000_000
    cpu = jax.devices("cpu")[0]
    assert memory_limit_bytes(cpu, 0.05, 7) == 7 + int(host_memory_bytes() * 0.05)
    assert memory_limit_bytes(cpu, 1.0, 0) == host_memory_bytes() > 100_000_000
