"""A script for `compile_in_child`: programs that gpu/attention.py times, compiled for an H200. See its test."""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu import jax_kernels as gpu_jax
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu.steps import decode_jobs, prefill_jobs
from jaxllm.pallas_kernels.gpu_target import gpu_mesh

ROUNDS, CALLS = 8, 4
NUM_PAGES = 1024  # More bytes than anything else in the program.


def main() -> None:
    mesh = gpu_mesh("h200")
    whole = NamedSharding(mesh, PartitionSpec())
    decode, prefill = (*decode_jobs((32, 8, 128), [8], [1024], 64), *prefill_jobs((32, 8, 128), [1024], 64))
    found = []
    for implementation, job, rounds, num_calls in (
        ("gpu", decode, ROUNDS, CALLS),
        ("gpu", prefill, ROUNDS, CALLS),
        ("xla", decode, ROUNDS, CALLS),
        ("xla", prefill, 1, 1),  # Is long, and so always a program by itself.
    ):
        ((_, calls),) = gpu_jax.paged(replace(job, num_places=1, num_pages=NUM_PAGES), implementation)
        arrays = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            (calls.q, calls.state, calls.common, list(calls.places) * num_calls),
        )
        with jax.set_mesh(mesh):
            program = gpu_timing.program(mesh.devices.flat[0])
            memory = program.lower(calls.attend, rounds, *arrays).compile().memory_analysis()
        found.append((calls.state.nbytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
