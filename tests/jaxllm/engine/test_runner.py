"""What the compiled programs do with memory; that pages and preemption do not change the tokens."""

import numpy as np
import pytest

from jaxllm.engine import runner as runner_module
from jaxllm.errors import OutOfMemoryError
from jaxllm.scheduler import SamplingRow

SAMPLED = SamplingRow(temperature=1.0, top_k=40, top_p=0.95, seed=7)


def random_prompts(count, min_len, max_len, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, rng.integers(min_len, max_len + 1)).tolist() for _ in range(count)]


# Memory


def test_pages_fill_the_memory_that_is_left(tiny_model, monkeypatch):
    model = tiny_model("llama")
    page_bytes = 3 * 4 * 8 * 16 * 4  # 3 layers, K and V of 2 heads, 8 tokens, 16 wide, float32.
    temporaries_bytes = 4096
    monkeypatch.setattr(runner_module, "_estimate_temporaries_bytes", lambda *_: temporaries_bytes)
    weights_bytes = model.model.weights_bytes

    def num_pages(limit_bytes, **options):
        monkeypatch.setattr(runner_module, "memory_limit_bytes", lambda *_: limit_bytes)
        runner, _ = model.start_runner(num_pages=None, **options)
        runner.shutdown()
        needed_bytes = runner._programs[runner.buckets[-1]].memory_analysis().temp_size_in_bytes
        assert weights_bytes + runner.num_pages * page_bytes + needed_bytes <= limit_bytes
        return runner.num_pages

    # The program needs more than was guessed at first, so that it is compiled for fewer pages again.
    guessed = weights_bytes + temporaries_bytes + 50 * page_bytes
    assert 17 <= num_pages(guessed) < 50
    assert num_pages(2**33) == 4 * 16 + 1  # All rows at max_model_len: more could not be used.
    with pytest.raises(
        OutOfMemoryError, match=r"needs at least 17 pages of 0\.01 MB .* Lower max_model_len or .*tensor_par"
    ):
        num_pages(weights_bytes + temporaries_bytes + 16 * page_bytes)


# Pages and preemption


@pytest.mark.parametrize("sampling", [SamplingRow(), SAMPLED], ids=["greedy", "sampled"])
def test_preempted_requests_repeat_their_tokens(tiny_llm, generate, sampling):
    runner, config = tiny_llm.engine.runner, tiny_llm.engine.config
    prompts = random_prompts(6, min_len=5, max_len=20)
    alone = [generate(runner, config, [prompt], 60, sampling=sampling)[0] for prompt in prompts]
    num_preemptions = []
    together = generate(
        runner,
        config,
        prompts,
        60,
        sampling=sampling,
        num_pages=22,
        on_plan=lambda scheduler: num_preemptions.append(scheduler.stats().num_preemptions),
    )
    assert together == alone
    assert num_preemptions[-1] >= 5


def test_80_requests_with_room_for_40_percent_of_their_pages(tiny_llm, generate):
    runner, config = tiny_llm.engine.runner, tiny_llm.engine.config
    # With these seeds no two logits at the top are nearer than 2.7e-4, ten times the noise of float32.
    rng = np.random.default_rng(4)
    prompts = random_prompts(80, min_len=1, max_len=60, seed=5)
    max_tokens = rng.integers(1, 60, 80).tolist()
    num_pages = [-(-(len(p) + n) // config.page_size) for p, n in zip(prompts, max_tokens, strict=True)]
    room = round(0.4 * np.mean(num_pages) * config.max_num_seqs)
    num_preemptions = []
    together = generate(  # It checks the scheduler's integrity at every step.
        runner,
        config,
        prompts,
        max_tokens,
        num_pages=room + 1,
        on_plan=lambda scheduler: num_preemptions.append(scheduler.stats().num_preemptions),
    )
    assert num_preemptions[-1] >= 10
    for prompt, n, tokens in zip(prompts, max_tokens, together, strict=True):
        assert [tokens] == generate(runner, config, [prompt], n)
