"""Layers that attend alike share pages; what a window left is given back, and the tokens stay the same."""

import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

from jaxllm import LLM
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.layers.layer_groups import LayerGroups, Place
from jaxllm.scheduler import Request, SampledTokens, Scheduler, SchedulerConfig
from jaxllm.scheduler.windows import num_request_pages

GEMMA3_270M = (512, 512, 512, 512, 512, None) * 3
GEMMA3_27B = tuple(None if layer % 6 == 5 else 1024 for layer in range(62))


def groups_of(windows, max_model_len):
    specs = [CacheSpec(num_kv_heads=1, head_dim=256, sliding_window=window) for window in windows]
    return LayerGroups.of(specs, max_model_len)


def places_by_group(groups):
    return [sorted(place.array for place in groups.places if place.group == g) for g in range(groups.num_groups)]


def test_one_kind_of_layer_is_one_group_and_each_layer_has_an_array():
    for window in (None, 4096):
        groups = groups_of((window,) * 30, max_model_len=8192)
        assert groups == LayerGroups((window,), 30, tuple(Place(0, layer) for layer in range(30)))


def test_kinds_are_cut_into_groups_of_the_rarest():
    groups = groups_of(GEMMA3_270M, max_model_len=32_768)
    assert groups.windows == (512,) * 5 + (None,)
    assert groups.num_arrays == 3
    assert places_by_group(groups) == [[0, 1, 2]] * 6
    assert [place.group for place in groups.places][5::6] == [5] * 3
    assert len(set(groups.places)) == 18, "two layers in one place"


def test_a_group_may_be_smaller_where_that_costs_least():
    groups = groups_of(GEMMA3_27B, max_model_len=131_072)
    assert (groups.num_arrays, groups.windows) == (10, (1024,) * 6 + (None,))
    assert [len(places) for places in places_by_group(groups)] == [10, 10, 10, 10, 10, 2, 10]
    # Twelve with a window and thirteen without: groups of twelve would keep twenty-four layers of everything.
    groups = groups_of((1024,) * 12 + (None,) * 13, max_model_len=131_072)
    assert (groups.num_arrays, groups.windows) == (13, (1024, None))


def test_a_window_that_no_request_fills_is_none():
    assert groups_of(GEMMA3_270M, max_model_len=512).windows == (None,)
    assert groups_of(GEMMA3_270M, max_model_len=513).num_groups == 6


def test_layers_that_keep_less_share_pieces_so_that_pages_have_no_rest():
    """Shapes like Gemma 4's: 50 layers with a window, and 10 without, which keep half as much of a token, or twice."""
    local = CacheSpec(num_kv_heads=16, head_dim=256, sliding_window=1024)
    for heads, num_arrays, num_groups in ((4, 5, 11), (16, 10, 4)):
        specs = ((local,) * 5 + (CacheSpec(num_kv_heads=heads, head_dim=512),)) * 10
        groups = LayerGroups.of(specs, max_model_len=131_072)
        assert (groups.num_arrays, groups.num_groups) == (num_arrays, num_groups)
        assert len(set(groups.places)) == 60, "two layers in one place"
        piece_size = max(spec.token_size for spec in specs)
        kept = [0] * groups.num_groups
        for spec, place in zip(specs, groups.places, strict=True):
            assert place.num_parts * spec.token_size == piece_size
            assert place.part < place.num_parts
            assert place.array < num_arrays
            kept[place.group] += spec.token_size
        assert sum(size < num_arrays * piece_size for size in kept) <= 1, "the last group of a kind at most"


# In the programs


def test_arrays_pass_from_layer_to_layer_without_a_copy(tiny_model):
    runner, _ = tiny_model("gemma3").start_runner(num_pages=1999)
    runner.wait_until_compiled()
    assert (runner.groups.num_arrays, runner.groups.num_groups) == (2, 2)
    size = prod(runner._kv_pages[0].shape)
    moved = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|transpose|convert|reverse|pad|concatenate|select)\(")
    for bucket, program in runner._programs.items():
        assert program.memory_analysis().alias_size_in_bytes >= runner.num_pages * runner._layout.page_bytes()
        found = moved.findall(program.as_text())
        assert found, "the pattern does not fit XLA's text any more"
        assert not [dims for dims, _ in found if prod(map(int, dims.split(","))) >= size], bucket
    runner.shutdown()


# The tokens


@pytest.fixture(scope="module")
def gemma3(tiny_model):
    """A runner and its config, prompts longer than the window of 8, and how transformers continues them."""
    runner, config = tiny_model("gemma3").start_runner(page_size=4, num_pages=200, max_num_batched_tokens=16)
    runner.wait_until_compiled()
    with np.load(Path(__file__).parents[2] / "data" / "tiny_goldens" / "gemma3.npz") as golden:
        ends = np.cumsum(golden["prompt_lens"])
        prompts = [
            golden["prompt_ids"][end - n : end].tolist() for end, n in zip(ends, golden["prompt_lens"], strict=True)
        ]
        expected = golden["greedy_ids"].tolist()
    assert max(map(len, prompts)) > 40
    yield runner, config, prompts, expected
    runner.shutdown()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_repeats", [1, 3])
def test_tokens_are_those_of_transformers(gemma3, generate, enable_prefix_caching, num_repeats):
    """In chunks of 16 tokens, one after the other and, from the second time on, from the pages of the first."""
    runner, config, prompts, expected = gemma3
    stats = []
    tokens = generate(
        runner,
        config,
        prompts * num_repeats,
        max_tokens=24,
        enable_prefix_caching=enable_prefix_caching,
        on_plan=lambda scheduler: stats.append(scheduler.stats()),
    )
    assert tokens == expected * num_repeats
    assert stats[-1].num_left_pages > 20
    assert (stats[-1].num_prefix_hit_tokens > 0) == (enable_prefix_caching and num_repeats > 1)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_get_the_tokens_of_transformers(gemma3, generate, enable_prefix_caching):
    runner, config, prompts, expected = gemma3
    stats = []
    tokens = generate(
        runner,
        config,
        prompts * 2,
        max_tokens=24,
        num_pages=1 + num_request_pages(84, runner.groups.windows, 16, 4) + 2,
        enable_prefix_caching=enable_prefix_caching,
        on_plan=lambda scheduler: stats.append(scheduler.stats()),
    )
    assert tokens == expected * 2
    assert stats[-1].num_preemptions > 0


def test_an_engine_counts_pages_by_group(tmp_path, write_tokenizer):
    write_tokenizer(write_tiny_model("gemma3", tmp_path))
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        page_size=4,
        compilation_cache_dir="",
    )
    config = llm.engine.scheduler.config
    assert config.windows == (8, None)
    # All pages of 128 tokens in one group; in the other those of 32 tokens and the 7 before them, not at page ends.
    assert config.num_pages == 1 + 4 * (32 + 11)
    llm.engine.shutdown()


# The memory


@pytest.mark.parametrize(
    ("layers", "num_tokens", "at_most"),
    [(GEMMA3_270M, 4096, 0.30), (GEMMA3_270M, 32_768, 0.19), (GEMMA3_27B, 4096, 0.42), (GEMMA3_27B, 32_768, 0.20)],
)
def test_gemma_3_takes_a_fraction_of_the_memory_of_one_table(layers, num_tokens, at_most):
    groups = groups_of(layers, max_model_len=num_tokens + 200)
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        max_model_len=num_tokens + 200,
        page_size=64,
        num_pages=10_000,
        windows=groups.windows,
    )
    scheduler = Scheduler(config)
    scheduler.add_request(Request("a", [1] * num_tokens, max_tokens=200))
    most_pages, num_decodes = 0, 0
    while (plan := scheduler.schedule()) is not None:
        num_pages = scheduler.stats().num_used_pages
        assert num_pages <= config.num_pages_for(num_tokens + 200)
        if plan.is_decode_only:
            most_pages, num_decodes = max(most_pages, num_pages), num_decodes + 1
        scheduler.update(plan, SampledTokens.one_each(np.zeros(1, np.int32)))
    assert num_decodes == 199
    scheduler.check_integrity()
    num_slots = most_pages * 64 * groups.num_arrays  # keys and values of one token in one layer each
    num_slots_of_one_table = -(-(num_tokens + 199) // 64) * 64 * len(layers)
    assert num_slots / num_slots_of_one_table < at_most
