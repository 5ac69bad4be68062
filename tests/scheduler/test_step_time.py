"""What a step takes is learned from the steps that ran."""

import numpy as np
import pytest

from jaxllm.scheduler.step_time import StepTimeModel

SIZES = (24, 48, 128, 512)
COST = np.array([0.020, 3e-4, 4e-6, 1e-6])  # seconds: of a step, a padded token, a KV token, a pair


def cost_of(num_padded_tokens, num_kv_tokens, num_pairs):
    return float(COST @ [1.0, num_padded_tokens, num_kv_tokens, num_pairs])


def learned(num_steps=200, noise=0.0, sizes=SIZES):
    """A model that has seen prompts of 4,000 tokens beside 16 decodes, and decodes alone."""
    model, rng = StepTimeModel(sizes), np.random.default_rng(0)
    for index in range(num_steps):
        factor = 1.0 + noise * rng.standard_normal()
        num_kv_tokens = 16 * int(rng.integers(200, 400))
        if index % 3 == 0:
            model.observe(16, num_kv_tokens, factor * cost_of(16, num_kv_tokens, 0), has_prompts=False)
            continue
        chunk, depth = int(rng.integers(2, 200)), int(rng.integers(0, 4000))
        num_pairs = chunk * (depth + chunk / 2)
        seconds = factor * cost_of(model.padded(16 + chunk), num_kv_tokens, num_pairs)
        model.observe(16 + chunk, num_kv_tokens, seconds, num_pairs=num_pairs, has_prompts=True)
    return model


def test_the_costs_of_padding_of_keys_and_of_pairs_are_told_apart():
    model = learned()
    for num_tokens, num_kv_tokens, num_pairs in [(20, 4000, 12_000.0), (60, 5000, 0.0), (500, 100, 1e6)]:
        seconds = cost_of(model.padded(num_tokens), num_kv_tokens, num_pairs)
        assert model.predict(num_tokens, num_kv_tokens, num_pairs) == pytest.approx(seconds, rel=1e-3)
    assert model.seconds_of_tokens(100) == pytest.approx(100 * COST[1] + 5000 * COST[3], rel=1e-2)


@pytest.mark.parametrize("sizes", [SIZES, ()])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_most_tokens_of_a_prompt_are_those_that_fit_and_no_more(sizes, noise):
    model = learned(noise=noise, sizes=sizes)
    for seconds in np.linspace(0.03, 0.4, 40):
        for depth in (0, 100, 1000, 4000):
            for at_most in (0, 1, 100, 496):
                found = model.most_prompt_tokens(seconds, 16, 4000, depth, at_most)
                takes = [model.predict(16 + n, 4000, n * (depth + n / 2)) for n in range(1, at_most + 1)]
                fitting = [n for n, its_seconds in enumerate(takes, 1) if its_seconds <= seconds]
                assert found == pytest.approx(max(fitting, default=0), abs=1e-9)


def test_with_depth_fewer_tokens_fit():
    model = learned(noise=0.05)
    most = [model.most_prompt_tokens(0.060, 16, 4000, depth, 496) for depth in range(0, 6000, 500)]
    assert most[0] > 30
    assert 0 < most[-1] < 5
    assert most == sorted(most, reverse=True)


def test_no_cost_comes_out_negative():
    """Chunks that all have the same size and ever more before them, as while one long prompt is read."""
    rng = np.random.default_rng(1)
    model = StepTimeModel(SIZES)
    for depth in range(0, 4000, 8):
        num_pairs = 8.0 * (depth + 4)
        seconds = cost_of(24, 4000, num_pairs) * (1 + 0.2 * rng.standard_normal())
        model.observe(24, 4000, seconds, num_pairs=num_pairs, has_prompts=True)
        assert (model._fitted() >= 0).all()
        if depth > 400:
            assert model.predict(24, 4000, num_pairs) == pytest.approx(cost_of(24, 4000, num_pairs), rel=0.2)


def test_what_prompts_cost_is_known_after_thousands_of_decodes():
    model = learned(noise=0.05)
    before = model.predict(500, 4000, 1e5)
    rng = np.random.default_rng(2)
    for index in range(5000):
        num_kv_tokens = 3200 + index % 500
        seconds = cost_of(16, num_kv_tokens, 0) * (1 + 0.05 * rng.standard_normal())
        model.observe(16, num_kv_tokens, seconds, has_prompts=False)
    assert model.predict(500, 4000, 1e5) == pytest.approx(before, rel=0.2)


def test_a_slower_device_is_learned():
    model = learned()
    for index in range(400):
        chunk, depth = 1 + index % 90, 40 * (index % 97)
        num_pairs = chunk * (depth + chunk / 2)
        seconds = 2 * cost_of(model.padded(16 + chunk), 4000, num_pairs)
        model.observe(16 + chunk, 4000, seconds, num_pairs=num_pairs, has_prompts=True)
    assert model.predict(100, 4000, 1e5) == pytest.approx(2 * cost_of(128, 4000, 1e5), rel=0.1)


def test_a_pause_of_the_host_is_not_taken_for_the_step():
    model = StepTimeModel()
    for index in range(60):
        model.observe(10 + index % 7, 100, 0.010, has_prompts=True)
    model.observe(10, 100, 30.0, has_prompts=True)
    assert model.predict(10, 100) < 0.012


def test_nothing_is_said_before_a_few_steps_have_run():
    model = StepTimeModel(SIZES)
    for _ in range(3):
        model.observe(16, 100, 0.01, has_prompts=True)
        assert model.predict(16, 100) is None
        assert model.seconds_of_tokens(16) is None
        assert model.most_prompt_tokens(1e-9, 16, 100, 0, at_most=77) == 77
