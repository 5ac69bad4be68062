"""The engine's programs with the GPU kernels, on a simulated GPU: the same tokens as with the kernel for CPUs."""

from functools import partial
from unittest import mock

import tiny_models
from attention_runs import gpu_simulator, gpu_test_blocks

from jaxllm.engine import runner
from jaxllm.models import model as model_module
from jaxllm.pallas_kernels.ragged_paged_attention import gpu_blocks

# One row alone and several beside it; a chunk in tiles, and prompts short enough to be packed.
PROMPTS = [[5, 7, 11, 13], list(range(20, 50))]


def test_the_gpu_kernels_generate_the_same_tokens(tiny_model, generate, monkeypatch):
    heads_of_64 = tiny_models.TINY_MODELS["llama"] | {"head_dim": 64, "num_hidden_layers": 2}
    monkeypatch.setitem(tiny_models.TINY_MODELS, "llama-64", heads_of_64)
    # As on GPUs; the CPU's programs have activations in float32, which the kernels do not take.
    for module in (runner, model_module):
        monkeypatch.setattr(module, "activation_dtype", lambda weight_dtype, platform: weight_dtype)
    model = tiny_model("llama-64", "float16")
    options = {"page_size": 16, "num_pages": 32}
    expected = generate(*model.start_runner(**options, attention_implementation="xla"), PROMPTS, max_tokens=3)
    blocks = {name: partial(gpu_test_blocks, getattr(gpu_blocks, name), few=True) for name in ("packed", "tiles")}
    with gpu_simulator(), mock.patch.multiple(gpu_blocks, **blocks):
        tokens = generate(*model.start_runner(**options, attention_implementation="gpu"), PROMPTS, max_tokens=3)
    assert tokens == expected
