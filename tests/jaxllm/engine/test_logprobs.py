"""Log-probabilities are those of the model's own logits, whatever is done to them before a token is drawn."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxllm import SamplingParams
from jaxllm.engine.sampler import NUM_TOP_LOGPROBS, _top_k_by_parts, logprobs
from jaxllm.sampling_params import MAX_LOGPROBS

DATA = Path(__file__).parents[2] / "data"
TOLERANCE = 3e-4  # as for logits, in test_models.py
jitted_logprobs = jax.jit(logprobs)

OVER_DEVICES = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxllm.engine.sampler import logprobs

logits_SV = jax.random.normal(jax.random.key(0), (5, 256)).round(1)  # with equal ones
arguments = np.arange(5), np.ones(5, bool)
expected = jax.jit(logprobs)(logits_SV, *arguments)
for num_devices in (2, 4, 16):  # of the 16 each has fewer tokens than are asked for
    mesh = jax.make_mesh((1, num_devices), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        split = jax.device_put(logits_SV, NamedSharding(mesh, PartitionSpec(None, "model")))
        found = jax.jit(logprobs)(split, *arguments)
    np.testing.assert_allclose(found.sampled, expected.sampled, rtol=1e-5)
    np.testing.assert_allclose(found.top, expected.top, rtol=1e-5)
    np.testing.assert_array_equal(found.top_token_ids, expected.top_token_ids)
"""
PROMPTS = [np.random.default_rng(length).integers(3, 256, length).tolist() for length in (1, 9, 60)]


def completions(llm, prompts, params):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def check(token, expected_V, num_top):
    """That a TokenLogprobs is what these log-probabilities (float [V]) say."""
    assert token.logprob == pytest.approx(expected_V[token.token_id], abs=TOLERANCE)
    top_ids = [token_id for token_id, _ in token.top]
    values = [value for _, value in token.top]
    assert len(set(top_ids)) == num_top
    assert values == sorted(values, reverse=True)
    np.testing.assert_allclose(values, expected_V[top_ids], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(values, np.sort(expected_V)[::-1][:num_top], atol=TOLERANCE, rtol=0)


def test_as_many_are_computed_as_may_be_asked_for():
    assert NUM_TOP_LOGPROBS == MAX_LOGPROBS


@pytest.mark.parametrize("vocab_size", [20, 33, 256, 1000, 5120])  # With parts of 4, 1, 128, 8, 128 tokens
def test_the_best_of_the_parts_are_those_of_the_whole(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits_SV = rng.normal(size=(40, vocab_size)).astype(np.float32)
    logits_SV[10:20] = logits_SV[10:20].round(0)  # Many equal ones, of which the lower ids count,
    logits_SV[20:30] = logits_SV[20:30].argsort(axis=1) // 7  # equal ones in every part,
    logits_SV[30:][:, 5:] = -np.inf  # and fewer than are asked for.
    expected = jax.lax.top_k(logits_SV, 20)
    found = jax.jit(_top_k_by_parts, static_argnums=1)(logits_SV, 20)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_the_first_token_has_the_log_softmax_of_transformers_logits(tiny_llm):
    with np.load(DATA / "tiny_goldens" / "llama.npz") as golden:
        ends = np.cumsum(golden["prompt_lens"])
        prompts = [
            golden["prompt_ids"][end - length : end].tolist()
            for end, length in zip(ends, golden["prompt_lens"], strict=True)
        ]
        logits = golden["logits"][ends - 1]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    for completion, logits_V in zip(completions(tiny_llm, prompts, params), logits, strict=True):
        [token] = completion.logprobs
        assert token.token_id == completion.token_ids[0] == token.top[0][0]
        check(token, log_softmax(logits_V.astype(np.float64)), 20)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5}]
)
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_each_token_has_those_of_its_place(tiny_llm, tiny_model, options, num_top):
    """Against a forward pass over prompt and output at once."""
    params = SamplingParams(max_tokens=8, logprobs=num_top, ignore_eos=True, **options)
    model = tiny_model("llama")
    for prompt, completion in zip(PROMPTS, completions(tiny_llm, PROMPTS, params), strict=True):
        assert [token.token_id for token in completion.logprobs] == completion.token_ids
        whole = [*prompt, *completion.token_ids][: model._forward.T]
        logits = model.prompt_logits(whole, [len(whole)])
        for place, token in enumerate(completion.logprobs):
            if len(prompt) + place <= len(whole):
                check(token, log_softmax(logits[len(prompt) + place - 1].astype(np.float64)), num_top)


def test_asking_for_them_changes_no_token_and_concerns_nobody_else(tiny_llm):
    """Among requests that do not ask, with more requests than rows and preemption."""
    params = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=20, ignore_eos=True, logprobs=number % 3 or None)
        for number in range(40)
    ]
    prompts = [PROMPTS[number % 3] for number in range(40)]
    plain = [SamplingParams(temperature=1.0, seed=number, max_tokens=20, ignore_eos=True) for number in range(40)]
    expected = completions(tiny_llm, prompts, plain)
    for number, completion in enumerate(completions(tiny_llm, prompts, params)):
        assert completion.token_ids == expected[number].token_ids
        if number % 3:
            assert [token.token_id for token in completion.logprobs] == completion.token_ids
            assert {len(token.top) for token in completion.logprobs} == {number % 3}
        else:
            assert completion.logprobs is None


def test_a_stop_token_has_one_too(tiny_llm):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [whole] = completions(tiny_llm, [PROMPTS[1]], params)
    stopping = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[whole.token_ids[5]], logprobs=1)
    [stopped] = completions(tiny_llm, [PROMPTS[1]], stopping)
    assert stopped.finish_reason == "stop"
    assert [token.token_id for token in stopped.logprobs] == stopped.token_ids


def test_nobody_pays_for_what_nobody_wants():
    """The program branches: without a row that wants them, zeros come back, and NaN logits do no harm."""
    logits_SV = jnp.full((3, 40), jnp.nan, jnp.float32)
    for array in jitted_logprobs(logits_SV, jnp.zeros(3, jnp.int32), jnp.zeros(3, bool)):
        np.testing.assert_array_equal(np.asarray(array), np.zeros_like(array))


def test_equal_logits_come_in_the_order_of_their_ids():
    logits_SV = jnp.zeros((2, 50), jnp.float32).at[1, 30].set(1.0)
    _, top_token_ids, top = jitted_logprobs(logits_SV, jnp.array([7, 30]), jnp.array([True, False]))
    assert np.asarray(top_token_ids)[0].tolist() == list(range(20))
    assert np.asarray(top_token_ids)[1].tolist() == [30, *range(19)]
    np.testing.assert_allclose(top[0], np.full(20, -np.log(50)), rtol=1e-6)


def test_a_vocabulary_split_over_devices_gives_the_same(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=16")
    result = subprocess.run([sys.executable, "-c", OVER_DEVICES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_vocabulary_may_be_smaller_than_what_is_asked_for():
    sampled, top_token_ids, _ = jitted_logprobs(jnp.zeros((1, 5)), jnp.array([2]), jnp.array([True]))
    assert np.asarray(top_token_ids).tolist() == [[0, 1, 2, 3, 4]]
    assert sampled[0] == pytest.approx(-np.log(5))


def test_logits_of_any_size_give_finite_log_probabilities():
    logits_SV = jnp.array([[3e38, -3e38, 0.0] + [-jnp.inf] * 20], jnp.float32)
    sampled, _, top = jitted_logprobs(logits_SV, jnp.array([0]), jnp.array([True]))
    assert sampled[0] == 0.0
    assert not np.isnan(np.asarray(top)).any()
