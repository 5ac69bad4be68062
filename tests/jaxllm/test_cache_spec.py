"""A model whose layers keep different things, as Gemma 4 does: heads of 16 in layers with a window, of 64 in others."""

import copy
import re
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY_MODELS

from jaxllm.layers import attention
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.rope import RopeConfig
from jaxllm.models.model import Model
from jaxllm.models.registry import FAMILIES

LOCAL = CacheSpec(num_kv_heads=2, head_dim=16, sliding_window=8)
GLOBAL = CacheSpec(num_kv_heads=1, head_dim=64)
PAGE_SIZE = 4


def two_kinds(family):
    def rope(head_dim):
        return RopeConfig(inv_freq=tuple((10_000.0 ** -np.linspace(0, 1, head_dim // 2)).tolist()))

    def parse_config(*arguments):
        return replace(
            family.parse_config(*arguments),
            cache_specs=(LOCAL, GLOBAL) * 2,
            local_rope=rope(LOCAL.head_dim),
            global_rope=rope(GLOBAL.head_dim),
        )

    return replace(family, parse_config=parse_config)


@pytest.fixture(scope="module")
def mixed(tiny_model):
    """The tiny Gemma 3 with layers of two kinds."""
    model = copy.copy(tiny_model("gemma3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "Gemma3ForCausalLM", two_kinds(FAMILIES["Gemma3ForCausalLM"]))
        checkpoint = SimpleNamespace(config=TINY_MODELS["gemma3"])
        model.model = Model.from_checkpoint(checkpoint, dtype=jnp.dtype("float32"), max_model_len=128, mesh=model.mesh)
    rng = np.random.default_rng(0)
    model.weights = [
        jnp.asarray(rng.standard_normal(struct.shape) * (1.4 * struct.shape[0] ** -0.5), struct.dtype)
        for struct in model.model.structs
    ]
    return model


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
        metadata = attention.StepMetadata(jnp.arange(len(ids_T)), None, None, None, False, None)
        return module.logits(module(ids_T, [None] * 4, metadata))

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
