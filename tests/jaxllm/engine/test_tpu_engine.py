"""The engine's programs with the TPU kernel, on a simulated TPU: the same tokens as with the kernel for CPUs."""

import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxllm.errors import ConfigError

PROMPTS = [[5, 7, 11, 13], list(range(20, 57)), [3] * 9, list(range(200, 120, -1))]


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_the_tpu_kernel_generates_the_same_tokens(tiny_model, generate, name):
    model = tiny_model(name)
    options = {"page_size": 16, "num_pages": 32}
    expected = generate(*model.start_runner(**options), PROMPTS, max_tokens=3)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        tokens = generate(*model.start_runner(**options, attention_implementation="tpu"), PROMPTS, max_tokens=3)
    assert tokens == expected


def test_what_the_tpu_kernel_cannot_do_is_refused_before_anything_is_compiled(tiny_model):
    with pytest.raises(ConfigError, match=r"page_size is 4; .* the TPU kernel takes 16, 32, 64, 128, 256"):
        tiny_model("llama").start_runner(page_size=4, attention_implementation="tpu")
