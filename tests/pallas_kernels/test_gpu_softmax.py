"""The running softmax of the GPU kernels, computed here without a GPU, where no operation is two of them in one."""

from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxllm.pallas_kernels.ragged_paged_attention import gpu_softmax
from jaxllm.pallas_kernels.ragged_paged_attention.gpu_softmax import MASKED, Scores, State

ROWS, BLOCK, HEAD_DIM = 8, 16, 4


@pytest.fixture(autouse=True)
def _no_layouts() -> Iterator[None]:
    def iota(dtype: jnp.dtype, shape: tuple[int, ...], dimension: int, *, layout: object) -> jax.Array:
        del layout
        return lax.broadcasted_iota(dtype, shape, dimension)

    with mock.patch.object(gpu_softmax.plgpu, "broadcasted_iota", iota):
        yield


def empty_state() -> State:
    return State(acc=jnp.zeros((ROWS, HEAD_DIM)), max=jnp.full((ROWS,), MASKED), total=jnp.zeros((ROWS,)))


@pytest.mark.parametrize("sm_scale", [64**-0.5, 0.1, 1.0])
@pytest.mark.parametrize("soft_cap", [None, 5.0, 30.0, 50.0])
def test_keys_that_a_row_does_not_see_have_no_weight(sm_scale, soft_cap):
    """Not even while it has seen no others: on a GPU scores * factor - max does not round the product, and a large
    finite score less itself may be large too."""
    scores = Scores(sm_scale=sm_scale, sliding_window=None, soft_cap=soft_cap)
    products = jnp.asarray(np.random.default_rng(0).normal(0.0, 3.0, (ROWS, BLOCK)), jnp.float32)
    products = products.at[:, 1::2].set(jnp.where(jnp.arange(ROWS) < 4, jnp.nan, 1.0)[:, None])  # Unwritten slots.
    state, weights = scores.update(
        empty_state(), products, k_scale=None, positions=jnp.int32(-1), first_key=jnp.int32(0)
    )
    assert not weights.any()
    assert not state.total.any()
    factor, weight = state.part()
    assert np.isfinite(factor).all()
    assert (weight <= MASKED).all()


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 20])
def test_block_by_block_is_the_softmax_of_what_is_visible(sliding_window, soft_cap):
    rng = np.random.default_rng(1)
    num_keys, k_scale = 3 * BLOCK, 0.25
    scores = Scores(sm_scale=0.3, sliding_window=sliding_window, soft_cap=soft_cap)
    products = rng.normal(0.0, 20.0, (ROWS, num_keys)).astype(np.float32)
    positions = np.array([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, num_keys - 2, num_keys - 1])

    state, found, maxima = empty_state(), [], []
    for first_key in range(0, num_keys, BLOCK):
        state, weights = scores.update(
            state,
            jnp.asarray(products[:, first_key : first_key + BLOCK]),
            k_scale=jnp.float32(k_scale),
            positions=jnp.asarray(positions, jnp.int32),
            first_key=jnp.int32(first_key),
        )
        found.append(np.asarray(weights, np.float64))
        maxima.append(np.asarray(state.max, np.float64))
    scaled = [w * np.exp2(m - maxima[-1])[:, None] for w, m in zip(found, maxima, strict=True)]

    logits = products.astype(np.float64) * 0.3 * k_scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    keys = np.arange(num_keys)
    is_visible = (keys <= positions[:, None]) & (keys > positions[:, None] - (sliding_window or num_keys))
    expected = np.where(is_visible, np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
    expected /= expected.sum(axis=1, keepdims=True)
    actual = np.concatenate(scaled, axis=1) / np.asarray(state.total)[:, None]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 16, 17, 40])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33])
def test_inner_blocks_are_those_that_every_token_sees_whole(num_tokens, sliding_window):
    scores = Scores(sm_scale=1.0, sliding_window=sliding_window, soft_cap=None)
    for start in (*range(0, 40), 100):  # The position of the first token.
        positions = start + np.arange(num_tokens)
        unit = gpu_softmax.Unit(seq=0, token=7, first=7, end=7 + num_tokens, offset=start - 7, first_block=0)
        last_block = int(positions[-1]) // BLOCK
        for first, end in ((0, last_block + 1), (last_block // 2, last_block + 1), (0, last_block)):
            inner, outer = (int(x) for x in scores.inner_blocks(unit, BLOCK, first, end))
            assert first <= inner
            assert outer <= end
            window = sliding_window or start + num_tokens
            whole = [
                block
                for block in range(first, end)
                if block * BLOCK > positions[-1] - window and (block + 1) * BLOCK - 1 <= positions[0]
            ]
            assert list(range(inner, outer)) == whole, (start, first, end)
