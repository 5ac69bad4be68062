"""What the tests of TPU kernels rely on: on the simulated chip, misdeeds do not go unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_runs import tpu_simulator
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

PARTS = jnp.arange(4 * 8 * 128, dtype=jnp.float32).reshape(4, 8, 128)
PART = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def fetch(index: int, *, wait_first: bool) -> jax.Array:
    """One of PARTS by a DMA, which is waited for before its destination is read, or only then."""

    def kernel(index, parts, out, buffer, sem):
        copy = pltpu.make_async_copy(parts.at[index[0]], buffer, sem)
        copy.start()
        if wait_first:
            copy.wait()
        out[...] = buffer[...]
        if not wait_first:
            copy.wait()

    with tpu_simulator():
        call = pl.pallas_call(
            kernel,
            out_shape=PART,
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM(PART.shape, PART.dtype), pltpu.SemaphoreType.DMA],
        )
        return jax.block_until_ready(jax.jit(call)(jnp.array([index], jnp.int32), PARTS))


def test_a_copy_that_is_waited_for_arrives():
    np.testing.assert_array_equal(fetch(3, wait_first=True), PARTS[3])


def test_a_copy_that_is_not_waited_for_is_a_race():
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError), match=r"RACE DETECTED|races_found"):
        fetch(3, wait_first=False)


def test_a_copy_from_beyond_an_array_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out-of-bounds read"):
        fetch(4, wait_first=True)


def test_memory_begins_as_nan():
    def kernel(out, buffer):
        out[...] = buffer[...]

    with tpu_simulator():
        call = pl.pallas_call(kernel, out_shape=PART, scratch_shapes=[pltpu.VMEM(PART.shape, PART.dtype)])
        assert np.isnan(jax.jit(call)()).all()
