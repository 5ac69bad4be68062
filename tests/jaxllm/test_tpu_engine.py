"""The engine's programs with the TPU kernel, on a simulated TPU: the same tokens as with the kernel for CPUs."""

import pytest
from jax.experimental.pallas import tpu as pltpu

PROMPTS = [[5, 7, 11, 13], list(range(20, 57)), [3] * 9, list(range(200, 120, -1))]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_tpu_kernel_generates_the_same_tokens(tiny_model, generate, name):
    model = tiny_model(name)
    options = {"page_size": 16, "num_pages": 32}
    expected = generate(*model.start_runner(**options), PROMPTS, max_tokens=6)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        tokens = generate(*model.start_runner(**options, attention_implementation="tpu"), PROMPTS, max_tokens=6)
    assert tokens == expected
