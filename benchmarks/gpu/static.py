"""What our kernels for GPUs take of a Hopper card, by their compilation, where there is none.

    make cuda                       # JAX's plugin with the compilers
    python -m benchmarks.gpu.static --cards h200 h100 --models llama-8b qwen3-0.6b

A row is a kernel of a program: of the decode program, or of the one for any mix of rows.

  registers, spills   of a thread; bytes that ptxas stores to memory and loads back, as registers did not suffice
  shared              bytes of shared memory of a block
  blocks, warps       that an SM has room for, by threads, registers and shared memory; warps of the 64 it can hold
  wgmma               instructions in the PTX; one in a loop counts once
  loops               instructions / wgmma of each innermost loop with products, in the machine code: what a warp issues
                      for a block of keys that all rows see whole and, longer, for one that needs a mask
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import run_jobs, serve
from benchmarks.gpu.steps import HEADS
from jaxllm.pallas_kernels.gpu_target import CARDS, environment

PLUGIN = Path(__file__).resolve().parents[2] / ".cuda"
PROGRAMS = ("decode", "mixed")
NUM_SEQS, NUM_TOKENS, CONTEXT, NUM_PAGES = 128, 2048, 32_768, 4096
TIMEOUT_S = 600
MAX_WARPS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=["h200"])
    parser.add_argument("--models", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--page-size", type=int, default=64, help="tokens (64)")
    args = parser.parse_args()
    print_figures(compile_kernels(args.cards, args.models, args.page_size))


def compile_kernels(cards: Sequence[str], models: Sequence[str], page_size: int) -> list[dict[str, Any]]:
    """The figures of each program, or its "error", for each card and shape of heads."""
    if not PLUGIN.is_dir():
        raise SystemExit(f"there is no {PLUGIN} with JAX's plugin for CUDA, to compile without a GPU: `make cuda`")
    shapes: dict[tuple[int, int, int], list[str]] = {}
    for model in models:
        shapes.setdefault(HEADS[model], []).append(model)
    jobs = [
        {"card": card, "models": names, "heads": heads, "program": program, "page_size": page_size}
        for card in cards
        for heads, names in shapes.items()
        for program in PROGRAMS
    ]
    command = [sys.executable, "-m", "benchmarks.gpu.static", "--child"]
    answers = run_jobs(command, jobs, variables=environment(PLUGIN), timeout_s=TIMEOUT_S)
    return [{**job, **answer} for job, answer in zip(jobs, answers, strict=True)]


def print_figures(programs: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'card':6}{'heads':12}{'program':9}{'kernel':26}{'registers':>10}{'spills':>8}{'shared':>10}"
        f"{'threads':>9}{'blocks':>8}{'warps':>7}{'wgmma':>7}  loops"
    )
    for program in programs:
        num_heads, num_kv_heads, head_dim = program["heads"]
        start = f"{program['card']:6}{f'{num_heads}/{num_kv_heads}x{head_dim}':12}{program['program']:9}"
        if "error" in program:
            print(f"{start}{program['error']}")
            continue
        for kernel in program["kernels"]:
            print(
                f"{start}{kernel['name']:26}{kernel['registers']:10,}{kernel['spill_bytes']:8,}"
                f"{kernel['shared_bytes']:10,}{kernel['threads']:9,}{kernel['blocks_per_sm']:8}"
                f"{kernel['warps_per_sm']:4}/{MAX_WARPS}{kernel['num_wgmma']:7,}  "
                + " ".join(f"{instructions}/{wgmma}" for instructions, wgmma in kernel["loops"])
            )
        print(
            f"{start}compiled in {program['compile_s']:.1f} s; {program['temp_bytes'] / 2**20:,.1f} MiB of "
            f"temporaries; the cache is updated {'in place' if program['in_place'] else 'in a COPY'}"
        )


def compile_program(card: str, heads: Sequence[int], program: str, page_size: int) -> dict[str, Any]:
    """Under the variables of `gpu_target.environment`: what the kernels of a program take."""
    import time

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxllm.pallas_kernels.gpu_target import compile_with_figures, gpu_mesh
    from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape, ragged_paged_attention

    num_heads, K, H = heads
    T = NUM_SEQS if program == "decode" else NUM_TOKENS
    spec = KVCacheSpec(
        num_pages=NUM_PAGES, page_size=page_size, num_kv_heads=K, head_dim=H, dtype=jnp.dtype(jnp.bfloat16)
    )
    mesh = gpu_mesh(card)
    on_card = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    cache = on_card(kv_cache_shape(spec, "gpu"), spec.dtype)
    attend = partial(ragged_paged_attention, sm_scale=H**-0.5, decode_only=program == "decode", implementation="gpu")
    with jax.set_mesh(mesh):
        lowered = jax.jit(attend, donate_argnums=3).lower(
            on_card((T, num_heads, H), jnp.bfloat16),
            on_card((T, K, H), jnp.bfloat16),
            on_card((T, K, H), jnp.bfloat16),
            cache,
            on_card((NUM_SEQS,), jnp.int32),
            on_card((NUM_SEQS, CONTEXT // page_size), jnp.int32),
            on_card((NUM_SEQS + 1,), jnp.int32),
            on_card((1,), jnp.int32),
        )
        start = time.perf_counter()
        compiled, kernels = compile_with_figures(lowered)
    memory = compiled.memory_analysis()
    assert memory is not None
    cache_bytes = cache.size * cache.dtype.itemsize
    return {
        "compile_s": time.perf_counter() - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "in_place": memory.alias_size_in_bytes >= cache_bytes > memory.temp_size_in_bytes,
        "kernels": [_figures(kernel, card) for kernel in kernels],
    }


def _figures(kernel: Any, card: str) -> dict[str, Any]:
    blocks = kernel.blocks_per_sm(CARDS[card])
    return {
        "name": kernel.name,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "stack_bytes": kernel.stack_bytes,
        "shared_bytes": kernel.static_shared_bytes + kernel.dynamic_shared_bytes,
        "threads": kernel.threads,
        "blocks_per_sm": blocks,
        "warps_per_sm": blocks * -(-kernel.threads // CARDS[card].threads_per_warp),
        "num_wgmma": kernel.num_wgmma,
        "loops": kernel.loops,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(lambda job: compile_program(job["card"], job["heads"], job["program"], job["page_size"]), sys.argv[2])
    else:
        main()
