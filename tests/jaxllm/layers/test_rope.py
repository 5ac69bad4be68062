"""Rotations against their published formulas, written out pair by pair as transformers has them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.rope import RopeConfig, make_rope, rotate

HEAD_DIM = 64
PLAIN = [10_000.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def rope(parameters=None, max_model_len=1024, head_dim=HEAD_DIM, max_position_embeddings=4096):
    parameters = {"rope_type": "default", "rope_theta": 10_000.0} | (parameters or {})
    return make_rope(parameters, head_dim, max_position_embeddings=max_position_embeddings, max_model_len=max_model_len)


def assert_is(config, inv_freq, scale=1.0):
    np.testing.assert_allclose(config.inv_freq, inv_freq, rtol=1e-12)
    assert config.scale == pytest.approx(scale, rel=1e-12)


def test_plain_and_linear():
    assert_is(rope(), PLAIN)
    assert_is(rope({"rope_theta": 500.0}), [500.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)])
    assert_is(rope({"rope_type": "linear", "factor": 4.0}), np.array(PLAIN) / 4)


def test_dynamic_takes_the_length_that_is_served():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    assert_is(rope(scaling, max_model_len=4096), PLAIN)
    base = 10_000.0 * (2.0 * 8192 / 4096 - 1.0) ** (HEAD_DIM / (HEAD_DIM - 2))
    expected = [base ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    assert_is(rope(scaling, max_model_len=8192), expected)


def test_llama3():
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = []
    for i in range(HEAD_DIM // 2):
        inv_freq = 500_000.0 ** (-2 * i / HEAD_DIM)
        wavelen = 2 * math.pi / inv_freq
        if wavelen > 8192 / 1.0:
            inv_freq /= 8.0
        elif wavelen >= 8192 / 4.0:
            smooth = (8192 / wavelen - 1.0) / (4.0 - 1.0)
            inv_freq = (1 - smooth) * inv_freq / 8.0 + smooth * inv_freq
        expected.append(inv_freq)
    assert_is(rope(parameters), expected)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 0.1 * math.log(4.0) + 1.0),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4.0) + 1.0) / (0.05 * math.log(4.0) + 1.0)),
        ({"beta_fast": 8, "beta_slow": 2}, 0.1 * math.log(4.0) + 1.0),
    ],
)
def test_yarn(truncate, options, scale):
    def pair_of(rotations):
        return HEAD_DIM * math.log(1024 / (rotations * 2 * math.pi)) / (2 * math.log(10_000.0))

    low, high = pair_of(options.get("beta_fast", 32)), pair_of(options.get("beta_slow", 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, inv_freq in enumerate(PLAIN):
        interpolated = min(max((i - low) / (high - low), 0), 1)
        expected.append(inv_freq / 4.0 * interpolated + inv_freq * (1 - interpolated))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": truncate}
    assert_is(rope(scaling | options), expected, scale)
    del scaling["factor"]  # Then it is the ratio of the lengths.
    assert_is(rope(scaling | options), expected, scale)


def test_longrope_takes_the_factors_for_the_length_that_is_served():
    rng = np.random.default_rng(0)
    short, long = rng.uniform(1, 2, HEAD_DIM // 2), rng.uniform(2, 60, HEAD_DIM // 2)
    parameters = {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": 4096,
    }
    scale = math.sqrt(1 + math.log(131_072 / 4096) / math.log(4096))
    assert_is(rope(parameters, 4096, max_position_embeddings=131_072), PLAIN / short, scale)
    assert_is(rope(parameters, 4097, max_position_embeddings=131_072), PLAIN / long, scale)
    given = parameters | {"attention_factor": 1.5}
    assert_is(rope(given, 4097, max_position_embeddings=131_072), PLAIN / long, 1.5)
    by_factor = parameters | {"factor": 16.0}  # It goes before the ratio of the lengths.
    scale = math.sqrt(1 + math.log(16.0) / math.log(4096))
    assert_is(rope(by_factor, 4097, max_position_embeddings=131_072), PLAIN / long, scale)


def test_the_divisors_of_a_gguf_file():
    factors = np.linspace(1, 8, HEAD_DIM // 2)
    assert_is(rope({"rope_type": "factors", "factors": factors.tolist()}), PLAIN / factors)


def test_a_parameter_that_the_type_needs_is_named():
    with pytest.raises(UnsupportedModelError, match="rope_type of 'linear' needs 'factor', which is missing"):
        rope({"rope_type": "linear"})


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'mrope' is not supported; known: default, linear"):
        rope({"rope_type": "mrope"})


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_pairs_turn_by_position_times_frequency(partial):
    """x'_i = x_i cos - x_(i+R/2) sin; x'_(i+R/2) = x_(i+R/2) cos + x_i sin; the dimensions from R on stay."""
    config = rope({"partial_rotary_factor": partial}, head_dim=16)
    R = int(16 * partial)
    assert len(config.inv_freq) == R // 2
    scaled = RopeConfig(inv_freq=config.inv_freq, scale=1.5)
    x = np.random.default_rng(0).standard_normal((4, 6, 16)).astype(np.float32)
    positions = np.array([0, 1, 77, 4000], np.int32)
    expected = x.astype(np.float64)
    for t, position in enumerate(positions):
        for i, inv_freq in enumerate(config.inv_freq):
            cos, sin = 1.5 * math.cos(position * inv_freq), 1.5 * math.sin(position * inv_freq)
            first, second = x[t, ..., i].astype(np.float64), x[t, ..., i + R // 2].astype(np.float64)
            expected[t, ..., i] = first * cos - second * sin
            expected[t, ..., i + R // 2] = second * cos + first * sin
    rotated = rotate(x, scaled.rotation(positions))
    np.testing.assert_allclose(rotated, expected, atol=2e-3)  # float32 angles of 4,000 rad are 2e-4 off.
    np.testing.assert_allclose(rotated[:3], expected[:3], atol=2e-5)


@pytest.mark.parametrize("rotated_dims", [64, 32])
def test_16_bits_are_rotated_as_32_are(rotated_dims):
    x_TNH = jax.random.normal(jax.random.key(0), (5, 3, 64), jnp.bfloat16)
    rotation = rope(head_dim=rotated_dims).rotation(jnp.arange(5))
    expected = rotate(x_TNH.astype(jnp.float32), rotation).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rotate(x_TNH, rotation)), np.asarray(expected))
