"""What the compiled programs do with memory; that pages, preemption and devices do not change the tokens."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from tiny_models import TINY_MODELS, write_tiny_model

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
    assert num_preemptions[-1] > 10
    for prompt, n, tokens in zip(prompts, max_tokens, together, strict=True):
        assert [tokens] == generate(runner, config, [prompt], n)


# Devices

OVER_DEVICES = """
import json, sys
from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
options = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 65,
    "compilation_cache_dir": "",
}
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
results = {}
for num_devices in (1, 2, 4):
    llm = LLM(folder, tensor_parallel_size=num_devices, **options)
    llm.engine.runner.wait_until_compiled()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    [shard, *others] = llm.engine.runner._kv_pages[0].addressable_shards
    results[num_devices] = {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "shards": 1 + len(others),
        "heads": shard.data.shape[1],
        "weights_bytes": sum(w.addressable_shards[0].data.nbytes for w in llm.engine.runner._weights),
    }
try:
    LLM(folder, tensor_parallel_size=3, **options)
except ConfigError as error:
    results["error"] = str(error)
print(json.dumps(results))
"""


def test_a_model_split_over_devices_gives_the_same_tokens(tmp_path, monkeypatch, write_tokenizer):
    config = TINY_MODELS["llama"] | {"num_key_value_heads": 4, "num_hidden_layers": 2}
    monkeypatch.setitem(TINY_MODELS, "four KV heads", config)
    write_tokenizer(write_tiny_model("four KV heads", tmp_path))
    prompts = json.dumps(random_prompts(6, min_len=1, max_len=60))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    command = [sys.executable, "-c", OVER_DEVICES, str(tmp_path), prompts]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout)
    for num_devices in (1, 2, 4):
        over = results[str(num_devices)]
        assert over["tokens"] == results["1"]["tokens"]
        assert (over["shards"], over["heads"]) == (num_devices, 8 // num_devices)
        assert over["weights_bytes"] < results["1"]["weights_bytes"] / num_devices * 1.1
    assert re.search(r"does not divide over 3 devices: .*KV heads", results["error"])
