"""What layers keep; and a model whose layers keep different things: heads of 16 within a window, heads of 64 of all."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import TINY_MODELS

from jaxllm.layers import attention
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.models.model import Model
from jaxllm.models.registry import FAMILIES

LOCAL = CacheSpec(num_kv_heads=2, head_dim=16, sliding_window=8)
GLOBAL = CacheSpec(num_kv_heads=1, head_dim=64)
PAGE_SIZE = 4


def two_kinds(family):
    """The family with these layers, whatever the config says; heads of 64 are rotated in their first 16 numbers."""

    def parse_config(*arguments):
        return replace(family.parse_config(*arguments), cache_specs=(LOCAL, GLOBAL) * 2)

    return replace(family, parse_config=parse_config)


@pytest.fixture(scope="module")
def mixed(tiny_model, tmp_path_factory, write_tokenizer):
    """The tiny Qwen2 with layers of two kinds, and a folder that has its weights."""
    folder, config = tmp_path_factory.mktemp("mixed"), TINY_MODELS["qwen2"] | {"num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "Qwen2ForCausalLM", two_kinds(FAMILIES["Qwen2ForCausalLM"]))
        shapes = Model.from_checkpoint(
            SimpleNamespace(config=config),
            dtype=jnp.dtype("float32"),
            max_model_len=128,
            mesh=tiny_model("llama").mesh,
        )
        rng, tensors = np.random.default_rng(0), {}
        for spec in shapes._specs.values():
            array = rng.standard_normal(spec.struct.shape)
            array = 1 + 0.3 * array if array.ndim == 1 else 2 * spec.struct.shape[0] ** -0.5 * array
            tensors[spec.sources[0]] = spec.assemble(array).astype(np.float32, order="C")
        save_file(tensors, folder / "model.safetensors")
        yield type(tiny_model("llama"))(folder, "float32", max_model_len=128)


@pytest.fixture(scope="module")
def runner(mixed):
    """(runner, config)"""
    runner, config = mixed.start_runner(page_size=PAGE_SIZE, num_pages=200, max_num_batched_tokens=16)
    runner.wait_until_compiled()
    yield runner, config
    runner.shutdown()


@pytest.fixture(scope="module")
def plain_logits(mixed):
    """float32 [T, V] of some tokens, by the same layers without a cache: a product of all queries and all keys."""

    def attend(q_TNH, k_TKH, v_TKH, cache, metadata, config):
        G = q_TNH.shape[1] // k_TKH.shape[1]
        k_TNH, v_TNH = jnp.repeat(k_TKH, G, 1), jnp.repeat(v_TKH, G, 1)
        scores_NTU = jnp.einsum("TNH,UNH->NTU", q_TNH, k_TNH, precision="highest") * config.sm_scale
        distance_TU = metadata.positions_T[:, None] - metadata.positions_T[None, :]
        is_seen_TU = (distance_TU >= 0) & (distance_TU < (config.cache.sliding_window or 10_000))
        weights_NTU = jax.nn.softmax(jnp.where(is_seen_TU[None], scores_NTU, -jnp.inf))
        return jnp.einsum("NTU,UNH->TNH", weights_NTU, v_TNH, precision="highest"), cache

    def logits(weights, ids_T):
        module = mixed.model.bind(weights)
        metadata = StepMetadata(jnp.arange(len(ids_T)), None, None, None, False, None)
        return module.logits(module(module.embed(ids_T), [None] * 4, metadata))

    program = jax.jit(logits, compiler_options={"xla_backend_optimization_level": 0})

    def padded(token_ids):
        ids_T = np.zeros(96, np.int32)  # What is not yet there cannot be seen.
        ids_T[: len(token_ids)] = token_ids
        return np.asarray(program(mixed.weights, ids_T))[: len(token_ids)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_attend", attend)
        padded([1])
    return padded


def random_prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(3, 256, size).tolist() for size in (3, 40, 17, 58, 29)]


@pytest.mark.parametrize("num_pages", [None, 100], ids=["room for all", "preemption"])
def test_tokens_are_those_without_a_cache(runner, generate, plain_logits, num_pages):
    """In chunks of 16 tokens; from the second time on, from the pages of the first."""
    prompts, stats = random_prompts() * 2, []
    outputs = generate(
        *runner, prompts, max_tokens=24, num_pages=num_pages, on_plan=lambda scheduler: stats.append(scheduler.stats())
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = plain_logits(prompt + output[:-1])[len(prompt) - 1 :]
        assert np.std(logits) > 0.5
        assert np.all(logits[np.arange(24), output] > logits.max(1) - 1e-4)
    assert stats[-1].num_left_pages > 20, "the window's pages"
    if num_pages is None:
        assert stats[-1].num_prefix_hit_tokens > 0
    else:
        assert stats[-1].num_preemptions > 0


def test_no_byte_of_a_page_is_for_layers_of_another_kind(runner):
    """Two layers of 2 x 16 numbers and one of 64 take a page alike."""
    runner, _ = runner
    assert runner.groups.windows == (8, None, None)
    assert [place.num_parts for place in runner.groups.places] == [2, 1, 2, 1]
    assert len(set(runner.groups.places)) == 4, "two layers in one place"
    assert runner.page_bytes == 2 * 64 * PAGE_SIZE * 4


def test_arrays_are_seen_in_both_shapes_without_a_copy(runner):
    runner, _ = runner
    size = prod(runner._kv_pages[0].shape)
    moved = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|transpose|convert|reverse|pad|concatenate|select)\(")
    for bucket, program in runner._programs.items():
        assert program.memory_analysis().alias_size_in_bytes >= runner.num_pages * runner.page_bytes
        found = moved.findall(program.as_text())
        assert found, "the pattern does not fit XLA's text any more"
        assert not [dims for dims, _ in found if prod(map(int, dims.split(","))) >= size], bucket


# Devices


def test_each_device_has_whole_heads_and_may_share_them():
    spec = CacheSpec(num_kv_heads=4, head_dim=16)
    assert spec.split(1) == spec.split(2) == spec.split(4) == spec
    assert spec.split(8) == CacheSpec(num_kv_heads=8, head_dim=16, num_copies=2)
    for num_devices in (3, 6):
        with pytest.raises(ValueError, match=f"4 KV heads cannot be shared out equally among {num_devices} devices"):
            spec.split(num_devices)


OVER_DEVICES = """
import json, sys
from test_cache_spec import two_kinds
from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.models.registry import FAMILIES

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
FAMILIES["Qwen2ForCausalLM"] = two_kinds(FAMILIES["Qwen2ForCausalLM"])
options = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 129,
    "compilation_cache_dir": "",
}
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
results = {}
for num_devices in (1, 2, 4):
    llm = LLM(folder, tensor_parallel_size=num_devices, **options)
    llm.engine.runner.wait_until_compiled()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    shards = llm.engine.runner._kv_pages[0].addressable_shards
    results[num_devices] = {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "shards": len(shards),
        "page_bytes": shards[0].data.nbytes // 129,
        "weights_bytes": sum(w.addressable_shards[0].data.nbytes for w in llm.engine.runner._weights),
    }
try:
    LLM(folder, tensor_parallel_size=3, **options)
except ConfigError as error:
    results["error"] = str(error)
print(json.dumps(results))
"""


def test_a_model_split_over_devices_gives_the_same_tokens(mixed, monkeypatch):
    """Also where there are more of them than KV heads, 2 and 1: then some hold the same head."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    prompts = json.dumps(random_prompts())
    command = [sys.executable, "-c", OVER_DEVICES, str(mixed.folder), prompts]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout)
    for num_devices in (1, 2, 4):
        over = results[str(num_devices)]
        assert over["tokens"] == results["1"]["tokens"]
        assert over["shards"] == num_devices
        assert over["page_bytes"] == 8 * GLOBAL.token_size * 4, "a whole head of 64"
        assert over["weights_bytes"] < results["1"]["weights_bytes"] / num_devices * 1.25  # K and V have copies.
    assert re.search(r"does not divide over 3 devices: .*KV heads", results["error"])
