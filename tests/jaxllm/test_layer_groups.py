"""Layers that attend alike share pages; what a window left is given back, and the tokens stay the same."""

import re
from math import prod

from jaxllm.layers.layer_groups import LayerGroups

GEMMA3_270M = (512, 512, 512, 512, 512, None) * 3
GEMMA3_27B = tuple(None if layer % 6 == 5 else 1024 for layer in range(62))


def places_by_group(groups):
    return [sorted(array for group, array in groups.places if group == g) for g in range(groups.num_groups)]


def test_one_kind_of_layer_is_one_group_and_each_layer_has_an_array():
    for window in (None, 4096):
        groups = LayerGroups.of((window,) * 30, max_model_len=8192)
        assert groups == LayerGroups((window,), 30, tuple((0, layer) for layer in range(30)))


def test_kinds_are_cut_into_groups_of_the_rarest():
    groups = LayerGroups.of(GEMMA3_270M, max_model_len=32_768)
    assert groups.windows == (512,) * 5 + (None,)
    assert groups.num_arrays == 3
    assert places_by_group(groups) == [[0, 1, 2]] * 6
    assert [group for group, _ in groups.places][5::6] == [5] * 3
    assert len(set(groups.places)) == 18, "two layers in one place"


def test_a_group_may_be_smaller_where_that_costs_least():
    groups = LayerGroups.of(GEMMA3_27B, max_model_len=131_072)
    assert (groups.num_arrays, groups.windows) == (10, (1024,) * 6 + (None,))
    assert [len(places) for places in places_by_group(groups)] == [10, 10, 10, 10, 10, 2, 10]
    # Twelve with a window and thirteen without: groups of twelve would keep twenty-four layers of everything.
    groups = LayerGroups.of((1024,) * 12 + (None,) * 13, max_model_len=131_072)
    assert (groups.num_arrays, groups.windows) == (13, (1024, None))


def test_a_window_that_no_request_fills_is_none():
    assert LayerGroups.of(GEMMA3_270M, max_model_len=512).windows == (None,)
    assert LayerGroups.of(GEMMA3_270M, max_model_len=513).num_groups == 6


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
