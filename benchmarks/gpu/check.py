"""The kernels for GPUs against the reference, on the GPU: the random cases of tests/pallas_kernels.

A child of attention.py (see jobs.py): `python -m benchmarks.gpu.check IMPLEMENTATION JOBS_FILE`. A job is a program of
`draw_jobs`, for which some steps are drawn.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "pallas_kernels"))

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import STYLES, Case, Program, draw_case, draw_programs, fitted
from jax import Array

from benchmarks.gpu.jobs import serve
from jaxllm.pallas_kernels.ragged_paged_attention import (
    KVCacheSpec,
    check_support,
    pages_from_tokens,
    ragged_paged_attention,
    tokens_from_pages,
)

CASES_PER_PROGRAM = 5
SEED = 1  # With 64 programs these are the cases of the nightly tests.
# Largest and mean error of outputs of about 1, as in the tests: weights and scaled queries are rounded to bfloat16.
TOLERANCE = {2: (3e-2, 2e-3), 1: (5e-2, 2e-3)}  # By the bytes of a number in the cache.


def draw_jobs(count: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Programs of sizes and dtypes that the kernels for GPUs take."""
    for number, program in enumerate(draw_programs(count, seed)):
        yield {"program": asdict(fitted(program, "gpu")), "seed": 1000 * seed + number}


def check(implementation: str, program: Program, seed: int) -> dict[str, Any]:
    """Largest and mean error of all outputs, over all cases; or why the implementation refuses the program.

    Raises:
      ValueError: a case is wrong; it says which, and what.
    """
    try:
        _check_support(implementation, program)
    except ValueError as error:
        return {"name": str(program), "refused": str(error)}
    run, expect = _compiled(program, implementation), _compiled(program, "reference")
    most, total, wrong = 0.0, 0.0, []
    for draw in range(CASES_PER_PROGRAM):
        case = draw_case(program, seed=100 * seed + draw, style=STYLES[draw % len(STYLES)])
        outcome, expected = run(case), expect(case)
        errors = np.abs(outcome["out_TNH"].astype(np.float32) - expected["out_TNH"].astype(np.float32))
        largest, mean = float(errors.max(initial=0)), float(errors.mean())
        most, total = max(most, largest), total + mean
        tolerated = TOLERANCE[jnp.dtype(program.kv_dtype).itemsize]
        # Relative to the largest output, of which many are means of few values; written so that NaN is wrong.
        size = max(1.0, float(np.abs(expected["out_TNH"].astype(np.float32)).max(initial=0)))
        if not (largest <= tolerated[0] * size and mean <= tolerated[1]):
            wrong.append(f"case {draw}: largest error {largest:.3g} of outputs up to {size:.3g}, mean {mean:.3g}")
        if not _same_bits(outcome["kv_BC2KH"], expected["kv_BC2KH"]):
            wrong.append(f"case {draw}: other bits in the cache")
    if wrong:
        raise ValueError(f"{program}: {'; '.join(wrong)}")
    return {"name": str(program), "largest_error": most, "mean_error": total / CASES_PER_PROGRAM}


def _check_support(implementation: str, program: Program) -> None:
    spec = KVCacheSpec(
        num_pages=program.num_pages,
        page_size=program.page_size,
        num_kv_heads=program.num_kv_heads,
        head_dim=program.head_dim,
        dtype=jnp.dtype(program.kv_dtype),
    )
    check_support(
        spec,
        num_heads=program.num_heads,
        q_dtype=jnp.dtype(program.q_dtype),
        max_seqs=program.num_seqs,
        max_pages_per_seq=program.pages_per_seq,
        implementation=implementation,
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """All NaNs are one."""
    unsigned = f"u{a.dtype.itemsize}"
    return bool(np.all((a.view(unsigned) == b.view(unsigned)) | ((a != a) & (b != b))))


def _compiled(program: Program, implementation: str) -> Any:
    attend = partial(ragged_paged_attention, implementation=implementation, **program.static_options)

    @jax.jit
    def step(
        q_TNH: Array, k_TKH: Array, v_TKH: Array, kv_BC2KH: Array, *rows: Array, **array_options: Array
    ) -> dict[str, Array]:
        # float32 products of GPUs are of TF32 otherwise, which has fewer bits than the kernels' outputs.
        with jax.default_matmul_precision("highest"):
            kv_pages = pages_from_tokens(kv_BC2KH, implementation)
            out_TNH, kv_pages = attend(q_TNH, k_TKH, v_TKH, kv_pages, *rows, **array_options)
        kv_BC2KH = tokens_from_pages(kv_pages, program.num_kv_heads, program.head_dim, implementation)
        return {"out_TNH": out_TNH, "kv_BC2KH": kv_BC2KH}

    def run(case: Case) -> dict[str, np.ndarray]:
        rows = (case.kv_lens_S, case.page_table_SP, case.cu_q_lens, case.num_seqs)
        results = step(case.q_TNH, case.k_TKH, case.v_TKH, case.kv_BC2KH, *rows, **case.array_options)
        return {name: np.asarray(result) for name, result in results.items()}

    return run


def main() -> None:
    implementation, jobs_file = sys.argv[1:]
    serve(lambda job: check(implementation, Program(**job["program"]), job["seed"]), jobs_file)


if __name__ == "__main__":
    main()
