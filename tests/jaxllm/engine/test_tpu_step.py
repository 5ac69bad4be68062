"""The whole step, compiled for TPUs that are not there: memory, collectives, and what is not moved.

Llama-3.1's own shapes without weights, through the runner that serves them. The quick tests have two layers, since what
they look for happens in every layer or in none; the nightly ones have all, in the buckets of the defaults. Llama over
eight chips is what has most to go wrong; those of one chip, a minute of compiling each, are nightly too.
"""

import re
from collections import Counter
from math import prod
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from hlo_program import Computations, Instruction, instructions, parse
from model_shapes import GEMMA3_4B, LLAMA_8B, LLAMA_70B

from jaxllm.config import EngineConfig, resolve
from jaxllm.engine import runner as runner_module
from jaxllm.engine.runner import Runner
from jaxllm.engine.sampler import NUM_TOP_LOGPROBS
from jaxllm.models.model import Model
from jaxllm.pallas_kernels.tpu_target import tpu_mesh
from jaxllm.scheduler.buckets import Bucket

LIBTPU = Path(__file__).parents[3] / ".libtpu" / "libtpu" / "libtpu.so"
HBM_BYTES = 32e9  # v6e: https://cloud.google.com/tpu/docs/v6e

# With the chips that they are split over.
MODELS = {"8b": (LLAMA_8B, 1), "70b": (LLAMA_70B, 8), "gemma": (GEMMA3_4B, 1)}


def compiled_runner(name: str, **options) -> Runner:
    """The runner of a model on v6e chips, with the programs that it makes at once: the largest, and that for decodes.

    Options are those of EngineConfig, and num_layers.
    """
    hf, num_devices = MODELS[name]
    if num_layers := options.pop("num_layers", None):  # Every second one without a window, where there are windows.
        hf |= {"num_hidden_layers": num_layers, "sliding_window_pattern": 2}
    mesh = tpu_mesh("v6e", model=num_devices, libtpu=LIBTPU)
    config = EngineConfig(model=name, max_model_len=8192, tensor_parallel_size=num_devices, **options)
    config = resolve(config, platform="tpu", model_max_len=hf["max_position_embeddings"])
    model = Model.from_checkpoint(
        SimpleNamespace(config=hf), dtype=jnp.dtype(config.dtype), max_model_len=config.max_model_len, mesh=mesh
    )
    runner = Runner(model, config, mesh)
    runner.wait_until_compiled()
    runner.shutdown()
    assert {bucket.is_decode_only for bucket in runner.ready_buckets} == {False, True}
    return runner


def local_shapes(structs) -> set[tuple[int, ...]]:
    return {struct.sharding.shard_shape(struct.shape) for struct in structs}


# What must hold of every program


def check_caches_are_updated_in_place(runner: Runner, bucket: Bucket, program: Computations) -> None:
    structs = runner._layout.structs(runner.num_pages)
    (cache_shape,) = local_shapes(structs)
    cache_bytes = runner.num_pages * runner._layout.page_bytes()
    assert cache_bytes == len(structs) * prod(cache_shape) * structs[0].dtype.itemsize
    assert runner._programs[bucket].memory_analysis().alias_size_in_bytes >= cache_bytes
    touching = [i for i in instructions(program) if cache_shape in i.shapes and not i.stays]
    assert [i for i in touching if not i.is_kernel] == []
    assert len(touching) == runner._model.config.num_layers  # One call of the kernel for each.


def check_weights_stay_as_they_are(runner: Runner, bucket: Bucket, program: Computations) -> None:
    matrices = {shape for shape in local_shapes(runner._model.structs) if len(shape) > 1}
    forms = matrices | {shape[::-1] for shape in matrices}
    touching = [i for i in instructions(program) if i.shapes & forms]
    assert sum(i.op == "parameter" for i in touching) >= len(matrices)
    assert [i for i in touching if not i.stays and not is_fusion_of_bitcasts(i, program)] == []


def is_fusion_of_bitcasts(instruction: Instruction, program: Computations) -> bool:
    called = re.search(r"calls=(%[\w.-]+)", instruction.rest)
    return instruction.op == "fusion" and {i.op for i in program[called[1]]} <= {"parameter", "bitcast"}


def collectives(program: Computations) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """How often each (operation, dtype in which it adds, shape) is in the program's text."""
    names = "all-reduce|all-gather|(ragged-)?all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    counter: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for i in instructions(program):
        if not re.fullmatch(f"({names})(-start)?", i.op):
            continue
        reducer = re.search(r"to_apply=(%[\w.-]+)", i.rest)
        adds_in = program[reducer[1]][-1].arrays[0][0] if reducer else None
        for dtype, shape, _ in i.arrays:
            counter[i.op.removesuffix("-start"), adds_in or dtype, shape] += 1
    return counter


def check_collectives(runner: Runner, bucket: Bucket, program: Computations) -> None:
    found = collectives(program)
    if runner._mesh.size == 1:
        assert not found
        return
    config = runner._model.config
    # Of the embedding, and after the attention and the feed-forward block of each layer. Half as wide as float32.
    activations = "all-reduce", "bf16", (bucket.num_tokens, config.model_dim)
    assert found.pop(activations, 0) == 1 + 2 * config.num_layers
    # The rest are the sampler's: a number for each row, and each device's likeliest tokens, for log-probabilities. The
    # logits stay where they were made.
    rows, likeliest = (bucket.num_seqs,), (runner._mesh.size, NUM_TOP_LOGPROBS, bucket.num_seqs)
    assert {(op, shape) for op, _, shape in found} == {("all-reduce", rows), ("all-gather", likeliest)}
    # 1 for the greatest logit and 1 for its token (greedy); 6 for a random one, of which 2 are in loops of 31 turns; 3
    # and 2 for these.
    assert found.total() == 13


CHECKS = check_caches_are_updated_in_place, check_weights_stay_as_they_are, check_collectives


@pytest.fixture(
    scope="module", params=["70b", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("8b", "gemma"))]
)
def quick(request) -> tuple[Runner, dict[Bucket, Computations]]:
    runner = compiled_runner(request.param, num_layers=2, num_pages=4096, max_num_seqs=32, max_num_batched_tokens=256)
    return runner, {bucket: parse(program) for bucket, program in runner._programs.items()}


@pytest.mark.parametrize("check", CHECKS)
def test_two_layers(quick, check):
    runner, programs = quick
    for bucket, program in programs.items():
        check(runner, bucket, program)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_fit_and_keep_to_the_rules(name, monkeypatch):
    monkeypatch.setattr(runner_module, "memory_limit_bytes", lambda *_: int(0.9 * HBM_BYTES))
    runner = compiled_runner(name)
    assert runner.num_pages * runner._config.page_size > 64_000
    for bucket, compiled in runner._programs.items():
        memory = compiled.memory_analysis()
        code_bytes = memory.generated_code_size_in_bytes * len(runner.buckets)
        assert memory.argument_size_in_bytes + memory.temp_size_in_bytes + code_bytes < HBM_BYTES
        program = parse(compiled)
        for check in CHECKS:
            check(runner, bucket, program)
