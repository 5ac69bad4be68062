"""Every family against what transformers computes (`tests/data/make_goldens.py`)."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import TINY_MODELS

from jaxllm.errors import ConfigError

GOLDENS = Path(__file__).parents[2] / "data" / "tiny_goldens"
FLOAT32_TOLERANCE = 3e-4  # Rounding gives 3e-5; the smallest mistake tried in a config 1.5e-3.

# These rotations depend on the length of the text. Ours is that of max_model_len (`make_rope`), so a prompt longer
# than the original context needs a model made for it, and the shorter ones a model made for them.
LENGTH_DEPENDENT = {"llama_dynamic_rope": 48, "llama_longrope": 48}

# The others are those of Llama but for the numbers in the rotation: the same programs.
STRUCTURES = [name for name in TINY_MODELS if not name.startswith("llama") or name == "llama"]

# For the runner, the rest has what one of these has: a window in no layer, in each, or in
# all but some; a vocabulary that is tied or not. `test_layer_groups` has gemma3, `test_smollm2` the real smollm2.
FOR_THE_RUNNER = {"qwen3", "gemma3_multimodal"}


def goldens(name):
    with np.load(GOLDENS / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def prompts_of(golden):
    ends = np.cumsum(golden["prompt_lens"])
    return [golden["prompt_ids"][end - n : end].tolist() for end, n in zip(ends, golden["prompt_lens"], strict=True)]


def max_model_len_for(name, prompt_len):
    if name not in LENGTH_DEPENDENT:
        return 128
    return LENGTH_DEPENDENT[name] if prompt_len < LENGTH_DEPENDENT[name] else prompt_len


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_equal_those_of_transformers_whole_and_in_chunks(name, tiny_model):
    golden = goldens(name)
    start = 0
    for prompt in prompts_of(golden):
        expected = golden["logits"][start : start + len(prompt)]
        start += len(prompt)
        model = tiny_model(name, "float32", max_model_len_for(name, len(prompt)))
        whole = model.prompt_logits(prompt, [len(prompt)])
        np.testing.assert_allclose(whole, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
        if len(prompt) > 7:
            chunks = [5, 1, len(prompt) - 6]
            in_chunks = model.prompt_logits(prompt, chunks)
            np.testing.assert_allclose(in_chunks, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", STRUCTURES)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(name, tiny_model):
    golden = goldens(name)
    prompts = prompts_of(golden)
    last = np.cumsum(golden["prompt_lens"]) - 1
    ours, theirs = [], []
    for prompt, row, bf16 in zip(prompts, last, golden["last_logits_bf16"], strict=True):
        model = tiny_model(name, "bfloat16", max_model_len_for(name, len(prompt)))
        ours.append(model.prompt_logits(prompt, [len(prompt)])[-1] - golden["logits"][row])
        theirs.append(bf16.astype(np.float32) - golden["logits"][row])
    rms_ours, rms_theirs = (np.sqrt(np.mean(np.square(x))) for x in (ours, theirs))
    assert rms_ours < 1.3 * rms_theirs


@pytest.mark.parametrize("name", TINY_MODELS)
def test_each_greedy_token_of_transformers_is_our_likeliest(name, tiny_model):
    golden = goldens(name)
    for prompt, expected in zip(prompts_of(golden), golden["greedy_ids"].tolist(), strict=True):
        if name in LENGTH_DEPENDENT and len(prompt) > LENGTH_DEPENDENT[name]:
            continue  # transformers turns the tokens by other angles than it turned the prompt.
        model = tiny_model(name, "float32", max_model_len_for(name, len(prompt)))
        logits = model.prompt_logits(prompt + expected[:-1], [len(prompt), len(expected) - 1])
        assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FOR_THE_RUNNER else pytest.mark.nightly) for name in STRUCTURES]
)
def test_scheduler_and_runner_continue_as_transformers_does(name, tiny_model, generate):
    golden = goldens(name)
    model = tiny_model(name, "float32", 128)
    runner, config = model.start_runner()
    assert generate(runner, config, prompts_of(golden), max_tokens=24) == golden["greedy_ids"].tolist()
    runner.shutdown()


@pytest.mark.parametrize("name", ["gemma3", "gemma3_multimodal"])
def test_a_family_that_overflows_in_float16_is_refused_in_it(tiny_model, name):
    with pytest.raises(ConfigError, match=r"dtype is float16, .* type gemma3\w* overflow: choose bfloat16 or float32"):
        tiny_model(name, "float16")
