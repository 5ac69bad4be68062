"""A script for `compile_in_child`: Llama-3.1-8B's step compiled for an H200, by the runner that serves it.

It gets the options of EngineConfig, num_layers, memory_bytes in place of num_pages, card_bytes, the memory of the card,
if that is not an H200's, and xla_flags; it prints what it sees of each program (`describe`) and the kernels' figures.
See test_gpu_step.
"""

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from types import SimpleNamespace

OPTIONS = json.loads(sys.argv[1])
FOLDER = tempfile.TemporaryDirectory()
os.environ["XLA_FLAGS"] = " ".join(  # XLA reads it once, very early.
    [f"--xla_dump_to={FOLDER.name}", "--xla_dump_hlo_as_text", *OPTIONS.pop("xla_flags", [])]
)
os.environ["MOSAIC_GPU_DUMP_TO"] = FOLDER.name

import jax.numpy as jnp  # noqa: E402
from hlo_program import Computations, Instruction, instructions, parse  # noqa: E402
from model_shapes import LLAMA_8B  # noqa: E402

from jaxllm.config import EngineConfig, resolve  # noqa: E402
from jaxllm.engine import runner as runner_module  # noqa: E402
from jaxllm.engine.runner import Runner  # noqa: E402
from jaxllm.models.model import Model  # noqa: E402
from jaxllm.pallas_kernels.gpu_target import CARDS, gpu_mesh, read_figures  # noqa: E402
from jaxllm.scheduler.buckets import Bucket  # noqa: E402

CARD = "h200"


def make_runner(
    *, num_layers: int, memory_bytes: int | None = None, card_bytes: int | None = None, **options
) -> Runner:
    """With the programs that it makes at once: the largest, and that for decodes."""
    if card_bytes is not None:
        CARDS[CARD] = dataclasses.replace(CARDS[CARD], memory_bytes=card_bytes)
    if memory_bytes is not None:
        runner_module.memory_limit_bytes = lambda *_: memory_bytes
    hf = LLAMA_8B | {"num_hidden_layers": num_layers}
    mesh = gpu_mesh(CARD, options.get("tensor_parallel_size", 1))
    config = EngineConfig(model="Llama-3.1-8B", max_model_len=8192, **options)
    config = resolve(config, platform="gpu", model_max_len=hf["max_position_embeddings"])
    model = Model.from_checkpoint(
        SimpleNamespace(config=hf), dtype=jnp.dtype(config.dtype), max_model_len=config.max_model_len, mesh=mesh
    )
    runner = Runner(model, config, mesh)
    runner.wait_until_compiled()
    runner.shutdown()
    return runner


def describe(runner: Runner, bucket: Bucket) -> dict[str, object]:
    program = runner._programs[bucket]
    memory = program.memory_analysis()
    (cache_shape,) = {s.sharding.shard_shape(s.shape) for s in runner._layout.structs(runner.num_pages)}
    computations = parse(program)
    parsed = list(instructions(computations))
    return {
        "is_decode_only": bucket.is_decode_only,
        "implementation": runner._layout.implementation,
        "num_layers": runner.groups.num_arrays,
        "cache_tokens": runner.num_pages * runner._config.page_size,
        "caches_bytes": runner.num_pages * runner._layout.page_bytes(),
        "one_cache_bytes": prod(cache_shape) * runner._layout.dtype.itemsize,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporaries_bytes": memory.temp_size_in_bytes,
        "arguments_bytes": memory.argument_size_in_bytes,
        # What gives arrays of a cache's shape, and how many of them there are.
        "of_cache_shape": Counter(i.op for i in parsed if cache_shape in i.shapes),
        "copies_of_cache_shape": [i.op for i in parsed if "copy" in i.op and cache_shape in i.shapes],
        "collectives": collectives(parsed),
        "planned_late": planned_late(computations) if runner._layout.implementation == "gpu" else [],
        "products": Counter(kind for i in parsed if (kind := product_kind(i.op, i.rest))),
        "kernels": Counter(re.search(r"/(paged_attention_\w+)/", i.rest)[1] for i in parsed if i.is_kernel),
    }


def planned_late(computations: Computations) -> list[str]:
    """What computes int32 arrays for the kernels after those of the first layer: each step should need them once."""
    (entry,) = [body for body in computations.values() if any(i.is_kernel for i in body)]  # In the order of execution.
    writes = [number for number, i in enumerate(entry) if i.is_kernel and "/paged_attention_write/" in i.rest]
    return [
        i.rest
        for i in entry[writes[1] :]
        if i.op == "fusion" and "ragged_paged_attention" in i.rest and {dtype for dtype, *_ in i.arrays} == {"s32"}
    ]


def collectives(program: list[Instruction]) -> Counter[str]:
    """How often what several GPUs do together is in the program's text: "all-reduce bf16[256,4096]"."""
    names = "all-reduce|all-gather|(ragged-)?all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    return Counter(
        f"{i.op.removesuffix('-start')} {dtype}[{','.join(map(str, shape))}]"
        for i in program
        if re.fullmatch(f"({names})(-start)?", i.op)
        for dtype, shape, _ in i.arrays
    )


def product_kind(op: str, rest: str) -> str | None:
    """Of a matrix product: what runs it."""
    if op == "fusion" and (triton := re.search(r'"kind":"(__triton\w*gemm\w*)"', rest)):
        return triton[1]
    library = re.search(r'custom_call_target="(__cublas[\w$]+)"', rest)
    return library[1] if library else None


def thunks() -> list[dict[str, object]]:
    """Of each program: what the host launches, and all kinds there are, inside and outside of graphs."""
    found = []
    for path in sorted(Path(FOLDER.name).glob("*jit_step.thunk_sequence_after_thunk_passes.txt")):
        lines = path.read_text().splitlines()
        launched = [match[1] for line in lines if (match := re.match(r"\d+: (k\w+)", line))]
        kinds = Counter(match[1] for line in lines if (match := re.match(r" *\d+: (k\w+)", line)))
        found.append({"launched": launched, "kinds": kinds})
    return found


def main() -> None:
    runner = make_runner(**OPTIONS)
    figures = [
        dataclasses.asdict(kernel) | {"blocks_per_sm": kernel.blocks_per_sm(CARDS[CARD])}
        for kernel in read_figures(Path(FOLDER.name))
    ]
    programs = [describe(runner, bucket) for bucket in runner.ready_buckets]
    print(json.dumps({"programs": programs, "thunks": thunks(), "kernels": figures}))


if __name__ == "__main__":
    main()
