from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare, gumbel_r

from jaxllm.engine.sampler import SamplingArrays, _gumbel, sample, truncate
from jaxllm.scheduler import SamplingRow

jitted_sample = jax.jit(sample)


def sampled_ids(*args) -> np.ndarray:
    """int32 [S], of rows whose logits are sound."""
    token_ids_S, is_sound_S = jitted_sample(*args)
    assert is_sound_S.all()
    return np.asarray(token_ids_S)


@jax.jit
def jitted_truncate(logits_SV: jax.Array, params: SamplingArrays) -> jax.Array:
    return truncate(logits_SV, jnp.max(logits_SV, axis=1, keepdims=True), params)


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def settings(num_rows, **of_rows) -> SamplingArrays:
    """Numbers for all rows, or an array with one for each; temperature 1 and the other settings off, if left out."""
    values = vars(SamplingRow(temperature=1.0)) | of_rows
    return {
        name: jnp.asarray(np.broadcast_to(np.asarray(values[name]).astype(dtype), (num_rows,)))
        for name, dtype in SamplingRow.dtypes().items()
    }


def kept(logits_SV, params: SamplingArrays) -> np.ndarray:
    distances_SV = np.asarray(jitted_truncate(jnp.asarray(logits_SV, jnp.float32), params))
    assert not np.isnan(distances_SV).any()
    return np.isfinite(distances_SV)


def kept_by_sorting(logits_V, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The definition, in float64, one filter after the other."""
    with np.errstate(over="ignore"):
        weights_V = np.exp((logits_V - logits_V.max()) / temperature)
    weights_V[weights_V < min_p] = 0
    if top_k > 0:
        weights_V[weights_V < np.sort(weights_V)[::-1][: int(top_k)][-1]] = 0
    if top_p < 1:
        probabilities_V = weights_V / weights_V.sum()
        mass_above_V = np.array([probabilities_V[probabilities_V > p].sum() for p in probabilities_V])
        weights_V[(mass_above_V >= top_p) & (mass_above_V > 0)] = 0
    return weights_V > 0


@pytest.mark.parametrize("values", ["distinct", "tied", "with -inf"])
def test_filters_keep_what_sorting_keeps(values):
    rng = np.random.default_rng(0)
    num_rows, vocab_size = 400, 37
    logits_SV = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    if values == "tied":
        logits_SV = np.round(logits_SV / 2)
    if values == "with -inf":
        logits_SV[rng.random(logits_SV.shape) < 0.5] = -np.inf
        logits_SV[:, 5] = rng.normal(0, 3, num_rows)
    temperature = rng.uniform(0.2, 3, num_rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, 20, 36, 37, 38, 2**31 - 1], num_rows)
    top_p = rng.choice([1e-6, 0.1, 0.5, 0.9, 0.99, 1], num_rows) * rng.choice([1, 0.97], num_rows)
    min_p = rng.choice([0, 0, 1e-3, 0.05, 0.3, 1], num_rows) * rng.choice([1, 0.97], num_rows)
    params = settings(num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected_SV = [
        kept_by_sorting(*row)
        for row in zip(logits_SV.astype(np.float64), temperature, top_k, top_p, min_p, strict=True)
    ]
    finite_SV = np.isfinite(logits_SV)
    np.testing.assert_array_equal(kept(logits_SV, params) & finite_SV, np.array(expected_SV) & finite_SV)


def test_top_k_keeps_the_values_of_lax_top_k():
    logits_SV = jax.random.normal(jax.random.key(0), (8, 5000), jnp.float32)
    values_SK, _ = jax.lax.top_k(logits_SV, 50)
    expected_SV = np.asarray(logits_SV) >= np.asarray(values_SK)[:, -1:]
    np.testing.assert_array_equal(kept(logits_SV, settings(8, top_k=50)), expected_SV)


def test_filters_that_are_off_keep_every_token():
    logits_SV = np.random.default_rng(1).normal(0, 10, (3, 1000))
    params = settings(3, top_k=[0, 1000, 2**31 - 1], top_p=1.0, min_p=0.0)
    assert kept(logits_SV, params).all()


def test_a_filter_of_one_row_leaves_the_other_rows_alone():
    logits_SV = np.random.default_rng(2).normal(0, 1, (3, 100))
    kept_SV = kept(logits_SV, settings(3, top_k=[0, 7, 0], top_p=[0.5, 1, 1]))
    assert kept_SV[0].sum() < 50
    assert kept_SV[1].sum() == 7
    assert kept_SV[2].all()


def test_equal_logits_at_the_cut_are_all_kept():
    logits_SV = np.array([[1, 2, 2, 2, 0]] * 2)
    np.testing.assert_array_equal(
        kept(logits_SV, settings(2, top_k=[2, 0], top_p=[1, 0.3])), [[False, True, True, True, False]] * 2
    )


@pytest.mark.parametrize("strictest", [{"top_p": 1e-30}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_best_token_survives_the_strictest_filter(strictest):
    logits_SV = np.random.default_rng(3).normal(0, 1, (4, 50))
    np.testing.assert_array_equal(kept(logits_SV, settings(4, **strictest)).sum(axis=1), 1)
    sampled_S = sampled_ids(
        jnp.asarray(logits_SV, jnp.float32), settings(4, **strictest), jnp.arange(4, dtype=jnp.int32)
    )
    np.testing.assert_array_equal(sampled_S, logits_SV.argmax(axis=1))


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 3e38])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
def test_extreme_logits_give_tokens_that_are_not_excluded(temperature, filters):
    inf = np.inf
    logits_SV = np.array(
        [
            [1e30, -1e30, 0, -inf],
            [-1e30, -1e30, -1e30, -inf],
            [3e38, -3e38, 0, -inf],
            [-inf, -inf, 1e-30, -inf],
            [0.0, -0.0, 0.0, -inf],
            [-inf, -inf, -inf, -inf],
        ],
        np.float32,
    )
    params = settings(6, temperature=temperature, seed=np.arange(6), **filters)
    assert not np.isnan(jitted_truncate(jnp.asarray(logits_SV), params)).any()
    for position in range(20):
        sampled_S = np.asarray(
            jitted_sample(jnp.asarray(logits_SV), params, jnp.full(6, position, jnp.int32)).token_ids
        )
        assert (sampled_S >= 0).all()
        assert np.isfinite(logits_SV[np.arange(5), sampled_S[:5]]).all()
        assert sampled_S[3] == 2


def test_greedy_rows_take_the_first_of_the_best_beside_random_rows_too():
    rng = np.random.default_rng(4)
    logits_SV = np.round(rng.normal(0, 1, (20, 30))).astype(np.float32)
    positions_S = jnp.arange(20, dtype=jnp.int32)
    for temperature in (0.0, np.where(np.arange(20) < 10, 0.0, 1.0)):
        params = settings(20, temperature=temperature, top_k=5, top_p=0.9, min_p=0.1)
        sampled_S = sampled_ids(jnp.asarray(logits_SV), params, positions_S)
        np.testing.assert_array_equal(sampled_S[:10], logits_SV.argmax(axis=1)[:10])
    assert sampled_S.dtype == jnp.int32


@pytest.mark.parametrize("filters", [{}, {"top_k": 8}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9, "min_p": 0.02}])
def test_draws_follow_the_filtered_softmax(filters):
    num_draws, vocab_size, temperature = 20_000, 40, 0.8
    logits_V = np.random.default_rng(5).normal(0, 1.5, vocab_size).astype(np.float32)
    sampled = sampled_ids(
        jnp.asarray(np.tile(logits_V, (num_draws, 1))),
        settings(num_draws, temperature=temperature, seed=-7, **filters),
        jnp.arange(num_draws, dtype=jnp.int32),
    )
    complete = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    kept_V = kept_by_sorting(logits_V.astype(np.float64), temperature, **complete)
    weights_V = np.exp(logits_V.astype(np.float64) / temperature) * kept_V
    counts_V = np.bincount(sampled, minlength=vocab_size)
    assert counts_V[~kept_V].sum() == 0
    expected_V = weights_V / weights_V.sum() * num_draws
    assert chisquare(counts_V[kept_V], expected_V[kept_V]).pvalue > 0.01


def test_noise_is_gumbel_far_into_its_tail():
    bits = np.unique(np.geomspace(1, 0.999 * 2**32, 10_000).astype(np.uint32) - 1)
    expected = gumbel_r.isf((bits.astype(np.float64) + 0.5) / 2**32)
    np.testing.assert_allclose(_gumbel(jnp.asarray(bits)), expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(_gumbel(jnp.asarray([2**32 - 1], jnp.uint32)))
    assert _gumbel(jnp.zeros(1, jnp.uint32)) > 22


def test_a_row_draws_the_same_token_in_any_batch():
    rng = np.random.default_rng(6)
    logits_SV = rng.normal(0, 2, (6, 500)).astype(np.float32)
    seed_S = np.array([0, 1, -1, 2**31 - 1, -(2**31), 1], np.int32)
    positions_S = np.array([3, 3, 1000, 0, 7, 4], np.int32)
    settings_of_rows = {
        "temperature": np.array([0.5, 1, 1.5, 0, 1, 2], np.float32),
        "top_k": np.array([0, 40, 0, 0, 3, 0]),
        "top_p": np.array([1, 1, 0.9, 1, 0.9, 1], np.float32),
    }

    def draw(rows):
        params = settings(len(rows), seed=seed_S[rows], **{k: v[rows] for k, v in settings_of_rows.items()})
        return sampled_ids(jnp.asarray(logits_SV[rows]), params, jnp.asarray(positions_S[rows]))

    together = draw(np.arange(6))
    np.testing.assert_array_equal(draw(np.arange(6)[::-1])[::-1], together)
    for row in range(6):
        assert draw(np.array([row]))[0] == together[row]
        assert draw(np.array([0, row, 3, 2, 5, 5, 4, 1]))[1] == together[row]


def test_seed_and_position_each_change_the_draws():
    logits_SV = jnp.zeros((1000, 1000), jnp.float32)
    positions_S = jnp.arange(1000, dtype=jnp.int32)
    base = sampled_ids(logits_SV, settings(1000, seed=1), positions_S)
    other_seed = sampled_ids(logits_SV, settings(1000, seed=2), positions_S)
    other_position = sampled_ids(logits_SV, settings(1000, seed=1), positions_S + 1)
    assert (base == other_seed).mean() < 0.01
    assert (base == other_position).mean() < 0.01
    np.testing.assert_array_equal(other_position[:-1], base[1:])


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1.0, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]], ids=["greedy", "random", "both"])
def test_a_row_without_sound_logits_says_so_and_the_others_draw_as_before(temperature, filters):
    inf, nan = np.inf, np.nan
    logits_SV = np.random.default_rng(8).normal(0, 1, (6, 40)).astype(np.float32)
    params, positions_S = settings(6, temperature=temperature, **filters), jnp.arange(6, dtype=jnp.int32)
    expected_S = sampled_ids(jnp.asarray(logits_SV), params, positions_S)
    logits_SV[0, 17] = nan
    logits_SV[1] = nan
    logits_SV[2, 3] = inf
    logits_SV[3] = -inf
    logits_SV[4, np.arange(40) != expected_S[4]] = -inf  # as a mask of the vocabulary leaves it
    token_ids_S, is_sound_S = jitted_sample(jnp.asarray(logits_SV), params, positions_S)
    assert np.asarray(is_sound_S).tolist() == [False] * 4 + [True] * 2
    assert ((np.asarray(token_ids_S) >= 0) & (np.asarray(token_ids_S) < 40)).all()
    np.testing.assert_array_equal(token_ids_S[4:], expected_S[4:])


def test_the_program_never_sorts():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), settings(4))
    program = jitted_sample.lower(
        jax.ShapeDtypeStruct((4, 100), jnp.float32), shapes, jax.ShapeDtypeStruct((4,), jnp.int32)
    )
    assert "sort" not in program.as_text()
    assert "chlo.top_k" not in program.as_text()
