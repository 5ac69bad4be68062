"""What only the GPU kernels could get wrong, on a simulated GPU: steps that the cases for every kernel do not hold."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from attention_cases import Program, draw_case
from attention_runs import bits, run
from test_ragged_paged_attention import assert_close

from jaxllm.pallas_kernels.ragged_paged_attention import gpu_combine


def program(
    group: int = 4, num_kv_heads: int = 1, head_dim: int = 64, kv_dtype: str = "bfloat16", **options: Any
) -> Program:
    sizes: dict[str, Any] = {"page_size": 16, "pages_per_seq": 24, "num_seqs": 4, "num_tokens": 64, **options}
    return Program(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=sizes["num_seqs"] * sizes["pages_per_seq"] + 2,
        q_dtype="bfloat16",
        kv_dtype=kv_dtype,
        **sizes,
    )


def check(program: Program, rows: Sequence[tuple[int, int]], *, few_thread_blocks: bool = False) -> None:
    case = draw_case(program, seed=0, rows=rows)
    if program.has_sinks:  # As much as 900 keys have.
        case.array_options["sinks_N"] += np.float32(4.0)
    outcome, expected = run(case, "gpu", small_blocks=few_thread_blocks), run(case, "reference")
    assert_close(outcome.out_TNH, expected.out_TNH, program)
    np.testing.assert_array_equal(bits(outcome.kv_BC2KH), bits(expected.kv_BC2KH))


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [
        pytest.param(1, [(1, 100)], marks=pytest.mark.nightly),
        (3, [(1, 16), (1, 17), (1, 1)]),
        pytest.param(9, [(9, 100)], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_steps_of_fewer_tokens_than_a_tile_has_rows(num_tokens, rows):
    check(program(num_tokens=num_tokens, num_seqs=len(rows)), rows)


def test_a_unit_in_more_parts_than_are_loaded_at_a_time():
    with mock.patch.object(gpu_combine, "NUM_LOADS", 2):
        check(
            program(num_seqs=2, num_tokens=2, page_size=256, pages_per_seq=4, decode_only=True, has_sinks=True),
            [(1, 7 * 128 - 3)],
        )


@pytest.mark.nightly
def test_rows_that_share_an_aligned_tile():
    check(program(group=16, num_tokens=20, num_seqs=3, pages_per_seq=4), [(5, 20), (6, 50), (7, 40)])


# Chunks in rows that begin 1 to 8 tokens after a multiple of 8, and 40 tokens later.
@pytest.mark.nightly
@pytest.mark.parametrize("shift", range(1, 9))
@pytest.mark.parametrize("few_thread_blocks", [False, True])
def test_chunks_begin_anywhere(shift, few_thread_blocks):
    rows = [(shift, shift + 30), (40, 200 + shift), (20 - shift, 128)]
    check(program(group=2, num_tokens=63 + shift), rows, few_thread_blocks=few_thread_blocks)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("group", "num_kv_heads", "max_tokens"), [(1, 3, 8), (5, 3, 4), (7, 2, 4), (12, 2, 4), (12, 3, 4), (16, 1, 4)]
)
def test_groups_of_any_size_and_rows_beside_the_border_of_the_two_kernels(group, num_kv_heads, max_tokens):
    rows = [(1, 100), (max_tokens, 60), (max_tokens + 1, 150), (0, 0)]
    check(program(group, num_kv_heads, num_tokens=40), rows)


@pytest.mark.nightly
@pytest.mark.parametrize("sliding_window", [1, 2, 16, 63, 64, 65, 127, 129, 200, 300])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_windows_end_anywhere_in_a_tile(sliding_window, kv_dtype):
    options: dict[str, Any] = {"page_size": 32, "pages_per_seq": 12, "num_tokens": 160}
    if kv_dtype != "bfloat16":
        options["scales"] = "heads"
    rows = [(1, 380), (8, 120), (147, 300)]
    check(program(kv_dtype=kv_dtype, sliding_window=sliding_window, has_sinks=True, **options), rows)
