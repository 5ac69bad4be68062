"""The whole step, compiled for an H200 that is not there: memory, kernels, and what the host has to launch.

Llama-3.1-8B's own shapes without weights, through the runner that serves it. The quick test has two layers, since what
it looks for happens in every layer or in none; the nightly ones have all, in the buckets of the defaults.
"""

import re
from math import prod
from pathlib import Path

import pytest
from gpu_compilation import compile_in_child

from jaxllm.engine.sampler import NUM_TOP_LOGPROBS

SCRIPT = Path(__file__).with_name("gpu_step_programs.py")
H200_BYTES = 141e9  # https://www.nvidia.com/en-us/data-center/h200/
# The arguments have 5.1 GB: so little room is left beside them that XLA would save memory, if we let it.
QUICK = {"num_layers": 2, "num_pages": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 256, "card_bytes": 6 * 10**9}
WHOLE = {"num_layers": 32, "memory_bytes": int(0.9 * H200_BYTES)}
KERNELS = {
    True: {"write": 1, "packed": 1, "combine": 1},  # Of each layer, in the program for decodes
    False: {"write": 1, "packed": 1, "tiles": 1, "combine": 2},  # and for all steps.
}


def check_caches_are_updated_in_place(program: dict) -> None:
    assert program["aliased_bytes"] >= program["caches_bytes"]
    assert program["copies_of_cache_shape"] == []
    assert program["temporaries_bytes"] < program["one_cache_bytes"]  # So there is no room for a copy.


def check_the_step_is_one_graph(thunks: dict, num_custom_calls: int) -> None:
    assert thunks["launched"] == ["kCommandBuffer"]
    assert thunks["kinds"]["kConditional"] >= 4  # Greedy or not, top_k, top_p, log-probabilities
    assert thunks["kinds"]["kWhile"] >= 2  # Of top_k and top_p
    assert thunks["kinds"].get("kCustomCall", 0) == num_custom_calls


def check_products_are_made_once(program: dict) -> None:
    # Of a layer: queries, keys and values in one; the output's; gate, up and down. And the logits. With two cards XLA
    # makes one of gate and up.
    of_layer = 4 if program["collectives"] else 5
    assert sum(program["products"].values()) == of_layer * program["num_layers"] + 1


def check_programs(found: dict) -> None:
    assert {program["is_decode_only"] for program in found["programs"]} == {False, True}
    for program in found["programs"]:
        assert program["implementation"] == "gpu"
        check_caches_are_updated_in_place(program)
        check_products_are_made_once(program)
        assert program["planned_late"] == []
        of_layer = KERNELS[program["is_decode_only"]]
        assert program["kernels"] == {
            f"paged_attention_{name}": n * program["num_layers"] for name, n in of_layer.items()
        }
    assert {kernel["name"].removeprefix("paged_attention_") for kernel in found["kernels"]} == set(KERNELS[False])
    for kernel in found["kernels"]:
        assert kernel["spill_bytes"] == kernel["stack_bytes"] == 0, kernel["name"]
        assert kernel["blocks_per_sm"] >= 1


def check_each_step_is_one_graph(found: dict) -> None:
    num_kernels = sorted(sum(program["kernels"].values()) for program in found["programs"])
    programs = sorted(found["thunks"], key=lambda thunks: thunks["kinds"].get("kCustomCall", 0))
    for thunks, num in zip(programs, num_kernels, strict=True):
        check_the_step_is_one_graph(thunks, num)


def test_two_layers():
    found = compile_in_child(SCRIPT, QUICK)
    check_programs(found)
    check_each_step_is_one_graph(found)
    assert not any(program["collectives"] for program in found["programs"])


# With it what GPUs send each other is in graphs too.
COLLECTIVES = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,"
    "COLLECTIVES"
)


@pytest.mark.nightly
@pytest.mark.parametrize("xla_flags", [[], [COLLECTIVES, "--xla_gpu_enable_cub_radix_sort=false"]], ids=str)
def test_two_layers_on_two_cards(xla_flags):
    found = compile_in_child(SCRIPT, QUICK | {"tensor_parallel_size": 2, "xla_flags": xla_flags})
    check_programs(found)
    for program in found["programs"]:
        rows = QUICK["max_num_seqs"]
        tokens = rows if program["is_decode_only"] else QUICK["max_num_batched_tokens"]
        # Of the embedding, and after the attention and the feed-forward block of each layer.
        activations = 1 + 2 * program["num_layers"]
        assert program["collectives"].pop(f"all-reduce bf16[{tokens},4096]") == activations
        # The rest are the sampler's, of numbers a row: no logits.
        assert max(prod(shape_of(name)) for name in program["collectives"]) <= 2 * NUM_TOP_LOGPROBS * rows
    if xla_flags:
        check_each_step_is_one_graph(found)


def shape_of(collective: str) -> list[int]:
    return [int(n) for n in re.findall(r"\[([\d,]+)\]", collective)[0].split(",")]


@pytest.mark.nightly
def test_the_whole_model_fits_and_keeps_to_the_rules():
    found = compile_in_child(SCRIPT, WHOLE, timeout_s=3600)
    check_programs(found)
    check_each_step_is_one_graph(found)
    for program in found["programs"]:
        assert program["arguments_bytes"] + program["temporaries_bytes"] < 0.9 * H200_BYTES
        assert program["cache_tokens"] > 700_000


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"attention_implementation": "xla"}, {"dtype": "float32"}], ids=str)
def test_with_xla_the_step_is_one_graph_too(options):
    """Asked for, or since the kernels take no float32."""
    found = compile_in_child(SCRIPT, QUICK | options, timeout_s=1800)
    for program in found["programs"]:
        assert program["implementation"] == "xla"
        assert not program["kernels"]
        check_caches_are_updated_in_place(program)
    for thunks in found["thunks"]:
        check_the_step_is_one_graph(thunks, 0)
