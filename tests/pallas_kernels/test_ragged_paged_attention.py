"""Every implementation of ragged paged attention against the reference, and the reference against a definition."""

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from attention_cases import STYLES, Case, Program, draw_case, draw_programs, fitted
from attention_runs import TPU_KINDS, Outcome, bits, run

from jaxllm.pallas_kernels.ragged_paged_attention import api

IMPLEMENTATIONS = tuple(name for name in api.IMPLEMENTATIONS if name != "reference")

# Largest and mean error, by what an implementation may round the operands of its dots to. In bfloat16 these are the
# weights, of at most 1, and queries or keys into which scales are multiplied: scores of about 3 move by a hundredth,
# and weights with them. Rounding has no sign, so what is systematic, a scale that is slightly off, shows in the mean.
TOLERANCE = {
    "float32": (2e-5, 1e-6),
    "bfloat16": (3e-2, 2e-3),
    "float16": (4e-3, 3e-4),
    "int8": (5e-2, 2e-3),
    "float8_e4m3fn": (5e-2, 2e-3),
    "float8_e5m2": (5e-2, 2e-3),
}

SMALL = Program(  # Three heads of 64: on TPUs two share a tile, the third one has another.
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    page_size=16,
    pages_per_seq=12,
    num_pages=74,
    num_seqs=6,
    num_tokens=96,
    q_dtype="float32",
    kv_dtype="float32",
)
# Of every second program a step of each style; of all of them one with all kinds of rows, and one with a chunk.
QUICK = [(program, i, (1, 4) if i % 2 else range(7)) for i, program in enumerate(draw_programs(6, seed=61))]
# A simulated GPU is slow: one of these two, of 16 bits, of 8 bits, and of heads of 256.
QUICK_ON_GPU = [(program, i, (4 if i % 2 else 1,)) for program, i, _ in QUICK if i in (0, 2, 3)]
NIGHTLY = [(program, 1000 + i, range(5)) for i, program in enumerate(draw_programs(64, seed=1))]


def each_case(suite: Sequence[tuple[Program, int, Sequence[int]]]) -> pytest.MarkDecorator:
    """(program, its number, number of the draw), those of one program next to each other, as it is compiled once."""
    cases = [(program, number, draw) for program, number, draws in suite for draw in draws]
    names = [f"{number}-{program}-{STYLES[draw % len(STYLES)]}-{draw}" for program, number, draw in cases]
    return pytest.mark.parametrize(("program", "number", "draw"), cases, ids=names)


# Of what one of the three compiles for itself, all but the slow simulated GPU: that has it in the nightly run.
QUICK_IMPLEMENTATIONS = [
    pytest.param(name, marks=pytest.mark.nightly if name == "gpu" else ()) for name in IMPLEMENTATIONS
]


def assert_close(actual: np.ndarray, expected: np.ndarray, program: Program) -> None:
    largest, mean = TOLERANCE[program.q_dtype]
    largest, mean = np.maximum((largest, mean), TOLERANCE[program.kv_dtype])
    actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(actual, expected, atol=largest, rtol=largest)
    assert np.abs(actual - expected).mean() <= mean


def assert_pages_without_new_tokens_are_untouched(case: Case, outcome: Outcome) -> None:
    """In every bit, what pads a layout included."""
    others = np.ones(case.program.num_pages, bool)
    others[[page for _, _, page, _ in case.new_tokens()]] = False
    np.testing.assert_array_equal(bits(outcome.kv_pages[others]), bits(outcome.kv_pages_before[others]))


@functools.cache
def drawn(program: Program, number: int, draw: int) -> tuple[Case, Outcome]:
    """A case and what the reference makes of it."""
    case = draw_case(program, seed=100 * number + draw, style=STYLES[draw % len(STYLES)])
    return case, run(case, "reference")


def check_against_the_reference(program: Program, number: int, draw: int, implementation: str) -> None:
    """Outputs are those of the reference within rounding; the cache is in every bit."""
    program = fitted(program, implementation)
    case, expected = drawn(program, number, draw)
    outcome = run(case, implementation, chip=list(TPU_KINDS)[number % 4], small_blocks=number % 3 != 2)
    assert_close(outcome.out_TNH, expected.out_TNH, program)
    np.testing.assert_array_equal(bits(outcome.kv_BC2KH), bits(expected.kv_BC2KH))
    assert_pages_without_new_tokens_are_untouched(case, outcome)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "gpu"])
@each_case(QUICK)
def test_equals_the_reference(program, number, draw, implementation):
    check_against_the_reference(program, number, draw, implementation)


@each_case(QUICK_ON_GPU)
def test_equals_the_reference_on_a_gpu(program, number, draw):
    check_against_the_reference(program, number, draw, "gpu")


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@each_case(NIGHTLY)
def test_equals_the_reference_in_many_cases(program, number, draw, implementation):
    check_against_the_reference(program, number, draw, implementation)


@each_case([(program, number, range(1)) for program, number, _ in QUICK])
def test_the_reference_equals_the_definition(program, number, draw):
    case, outcome = drawn(program, number, draw)
    kv_BC2KH = written_by_definition(case)
    np.testing.assert_array_equal(bits(outcome.kv_BC2KH), bits(kv_BC2KH))
    rtol = 2**-8 if program.q_dtype == "bfloat16" else 2e-5  # That of the output alone.
    expected = attention_by_definition(case, kv_BC2KH)
    np.testing.assert_allclose(outcome.out_TNH.astype(np.float64), expected, atol=2e-5, rtol=rtol)


def written_by_definition(case: Case) -> np.ndarray:
    """The cache with the new tokens in it, divided by their scale, rounded, and cut off where the dtype ends."""
    dtype = case.kv_BC2KH.dtype
    kv_BC2KH = case.kv_BC2KH.copy()
    for _, token, page, slot in case.new_tokens():
        for kv, (x_TKH, name) in enumerate(((case.k_TKH, "k_scale"), (case.v_TKH, "v_scale"))):
            x_KH = x_TKH[token].astype(np.float32)
            x_KH = x_KH / np.reshape(case.array_options.get(name, np.float32(1)), (-1, 1))
            if dtype.itemsize == 1:
                info = np.iinfo(dtype) if dtype == np.int8 else ml_dtypes.finfo(dtype)
                x_KH = np.clip(np.rint(x_KH) if dtype == np.int8 else x_KH, float(info.min), float(info.max))
            kv_BC2KH[page, slot, kv] = x_KH.astype(dtype)
    return kv_BC2KH


def attention_by_definition(case: Case, kv_BC2KH: np.ndarray) -> np.ndarray:
    """One token and one head at a time, in float64; zero for padding."""
    program, options = case.program, case.array_options
    k_scale_K, v_scale_K = (
        np.broadcast_to(options.get(name, 1.0), program.num_kv_heads).astype(np.float64)
        for name in ("k_scale", "v_scale")
    )
    out_TNH = np.zeros(case.q_TNH.shape)
    for s, ((q_len, kv_len), (start, _)) in enumerate(zip(case.rows, pairwise(case.cu_q_lens), strict=False)):
        kv_C2KH = kv_BC2KH[case.page_table_SP[s]].reshape(-1, *kv_BC2KH.shape[2:]).astype(np.float64)
        for i in range(q_len):
            position = kv_len - q_len + i
            first = 0 if program.sliding_window is None else max(0, position - program.sliding_window + 1)
            for n in range(program.num_heads):
                h = n // (program.num_heads // program.num_kv_heads)
                k_CH = kv_C2KH[first : position + 1, 0, h] * k_scale_K[h]
                v_CH = kv_C2KH[first : position + 1, 1, h] * v_scale_K[h]
                scores_C = k_CH @ case.q_TNH[start + i, n].astype(np.float64) * program.head_dim**-0.5
                if program.soft_cap is not None:
                    scores_C = program.soft_cap * np.tanh(scores_C / program.soft_cap)
                most = max(scores_C.max(), options["sinks_N"][n]) if program.has_sinks else scores_C.max()
                weights_C = np.exp(scores_C - most)
                total = weights_C.sum() + (np.exp(options["sinks_N"][n] - most) if program.has_sinks else 0.0)
                out_TNH[start + i, n] = weights_C @ v_CH / total
    return out_TNH


@pytest.mark.parametrize("implementation", QUICK_IMPLEMENTATIONS)
@pytest.mark.parametrize("first_len", [130, 124, 136])
def test_chunks_and_blocks_of_keys_meet_at_every_offset(first_len, implementation):
    """The smallest blocks have 128 tokens: these rows begin before, at and after the border of the first."""
    small = fitted(SMALL, implementation)
    case = draw_case(small, seed=first_len, rows=[(9, first_len + i) for i in range(small.num_seqs)])
    assert_close(run(case, implementation).out_TNH, run(case, "reference").out_TNH, small)


@pytest.mark.parametrize("implementation", QUICK_IMPLEMENTATIONS)
def test_where_pages_lie_changes_nothing(implementation):
    small = fitted(SMALL, implementation)
    case = draw_case(small, seed=1)
    moved_to_B = np.concatenate([[0], np.random.default_rng(1).permutation(small.num_pages - 1) + 1])
    moved_kv_BC2KH = np.empty_like(case.kv_BC2KH)
    moved_kv_BC2KH[moved_to_B] = case.kv_BC2KH
    moved = dataclasses.replace(
        case, kv_BC2KH=moved_kv_BC2KH, page_table_SP=moved_to_B[case.page_table_SP].astype(np.int32)
    )
    outcome, moved_outcome = run(case, implementation), run(moved, implementation)
    np.testing.assert_array_equal(bits(outcome.out_TNH), bits(moved_outcome.out_TNH))
    np.testing.assert_array_equal(bits(outcome.kv_BC2KH), bits(moved_outcome.kv_BC2KH[moved_to_B]))


@pytest.mark.parametrize("implementation", QUICK_IMPLEMENTATIONS)
@pytest.mark.parametrize("ends", [[1, 17, 25, 96], [64, 96], [15, 16, 80, 96]], ids=str)
def test_splitting_a_prompt_changes_nothing_beyond_rounding(ends, implementation):
    small = fitted(SMALL, implementation)
    whole = draw_case(small, seed=2, rows=[(96, 96)])
    expected = run(whole, implementation)
    outs_TNH, kv_BC2KH = [], whole.kv_BC2KH
    for start, end in pairwise([0, *ends]):
        part = dataclasses.replace(
            whole,
            rows=[(end - start, end)],
            kv_lens_S=np.where(np.arange(small.num_seqs) == 0, end, whole.kv_lens_S).astype(np.int32),
            cu_q_lens=np.minimum(whole.cu_q_lens, end - start),
            kv_BC2KH=kv_BC2KH,
            **{name: np.roll(getattr(whole, name), -start, axis=0) for name in ("q_TNH", "k_TKH", "v_TKH")},
        )
        outcome = run(part, implementation)
        kv_BC2KH = outcome.kv_BC2KH
        outs_TNH.append(outcome.out_TNH[: end - start])
    assert_close(np.concatenate(outs_TNH), expected.out_TNH, small)
    np.testing.assert_array_equal(bits(kv_BC2KH), bits(expected.kv_BC2KH))


@pytest.mark.parametrize("implementation", QUICK_IMPLEMENTATIONS)
def test_the_order_of_rows_changes_nothing_beyond_rounding(implementation):
    small = fitted(SMALL, implementation)
    rows = [(1, 33), (40, 45), (5, 90), (1, 190), (20, 64), (2, 2)]
    case = draw_case(small, seed=3, rows=rows)
    order = [3, 2, 5, 0, 4, 1]
    starts = np.cumsum([0, *(q_len for q_len, _ in rows)])
    order_T = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
    order_T = np.concatenate([order_T, np.arange(len(order_T), small.num_tokens)])
    other = dataclasses.replace(
        case,
        rows=[rows[s] for s in order],
        kv_lens_S=case.kv_lens_S[order],
        page_table_SP=case.page_table_SP[order],
        cu_q_lens=np.cumsum([0, *(rows[s][0] for s in order)]).astype(np.int32),
        **{name: getattr(case, name)[order_T] for name in ("q_TNH", "k_TKH", "v_TKH")},
    )
    outcome, other_outcome = run(case, implementation), run(other, implementation)
    assert_close(other_outcome.out_TNH, outcome.out_TNH[order_T], small)
    np.testing.assert_array_equal(bits(outcome.kv_BC2KH), bits(other_outcome.kv_BC2KH))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_changes_nothing_and_gives_zeros(implementation):
    small = fitted(SMALL, implementation)
    case = draw_case(small, seed=4, rows=[(1, 20), (7, 50), (1, 1)])
    num_tokens, num_rows = 9, 3
    is_token_T11 = (np.arange(small.num_tokens) < num_tokens)[:, None, None]
    is_row_S = np.arange(small.num_seqs) < num_rows
    plain = dataclasses.replace(
        case,
        kv_lens_S=np.where(is_row_S, case.kv_lens_S, 0).astype(np.int32),
        page_table_SP=np.where(is_row_S[:, None], case.page_table_SP, 0).astype(np.int32),
        **{
            name: np.where(is_token_T11, getattr(case, name), getattr(case, name).dtype.type(1))
            for name in ("q_TNH", "k_TKH", "v_TKH")
        },
    )
    outcome, plain_outcome = run(case, implementation), run(plain, implementation)
    np.testing.assert_array_equal(bits(outcome.out_TNH), bits(plain_outcome.out_TNH))
    np.testing.assert_array_equal(bits(outcome.kv_pages), bits(plain_outcome.kv_pages))
    assert outcome.out_TNH[:num_tokens].any(axis=(1, 2)).all()
    assert not outcome.out_TNH[num_tokens:].any()


@pytest.mark.parametrize("implementation", api.IMPLEMENTATIONS)
def test_what_is_no_number_reaches_those_who_see_it_and_nobody_else(implementation):
    """Neither other rows of the step, nor the tokens before it, whose keys and values others may share."""
    small = fitted(SMALL, implementation)
    case = draw_case(small, seed=7, rows=[(1, 33), (40, 45), (5, 90), (1, 190), (20, 64), (1, 40)])
    spoiled = dataclasses.replace(case, **{name: getattr(case, name).copy() for name in ("q_TNH", "k_TKH", "v_TKH")})
    spoiled.q_TNH[0] = np.nan  # row 0
    spoiled.v_TKH[21, :, 3] = np.inf  # in the middle of row 1
    spoiled.k_TKH[46] = np.nan  # row 3
    spoiled.v_TKH[67, :, 5] = -np.inf  # row 5
    has_seen_T = np.isin(np.arange(small.num_tokens), [0, *range(21, 41), 46, 67])
    outcome, expected = run(spoiled, implementation), run(case, implementation)
    np.testing.assert_array_equal(bits(outcome.out_TNH[~has_seen_T]), bits(expected.out_TNH[~has_seen_T]))
    assert not np.isfinite(outcome.out_TNH[has_seen_T].astype(np.float32)).all(axis=2).any()
    # A second step, of who shares the pages before it.
    shared = dataclasses.replace(
        draw_case(small, seed=8, rows=[(2, 20)]), kv_BC2KH=outcome.kv_BC2KH, page_table_SP=case.page_table_SP[[1] * 6]
    )
    unspoiled = dataclasses.replace(shared, kv_BC2KH=expected.kv_BC2KH)
    np.testing.assert_array_equal(
        bits(run(shared, implementation).out_TNH), bits(run(unspoiled, implementation).out_TNH)
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [[], [(0, 0), (0, 40)]], ids=["no rows", "rows without tokens"])
def test_a_step_without_tokens_touches_nothing(rows, implementation):
    small = fitted(SMALL, implementation)
    outcome = run(draw_case(small, seed=5, rows=rows), implementation)
    assert not outcome.out_TNH.any()
    np.testing.assert_array_equal(bits(outcome.kv_pages), bits(outcome.kv_pages_before))


@pytest.mark.parametrize("implementation", QUICK_IMPLEMENTATIONS)
def test_the_promise_of_decodes_only_changes_nothing_beyond_rounding(implementation):
    small = fitted(SMALL, implementation)
    S = small.num_seqs
    case = draw_case(small, seed=6, rows=[(1, 33), (1, 1), (1, 16), (1, 190), (1, 64)])
    promised = dataclasses.replace(
        case,
        program=dataclasses.replace(small, num_tokens=S, decode_only=True),
        **{name: getattr(case, name)[:S] for name in ("q_TNH", "k_TKH", "v_TKH")},
    )
    outcome, promised_outcome = run(case, implementation), run(promised, implementation)
    assert_close(promised_outcome.out_TNH, outcome.out_TNH[:S], small)
    np.testing.assert_array_equal(bits(promised_outcome.kv_pages), bits(outcome.kv_pages))


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (2, 80), (3, 64), (1, 256), (3, 80)])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("implementation", api.IMPLEMENTATIONS)
def test_pages_give_back_their_tokens_in_every_bit(implementation, kv_dtype, num_kv_heads, head_dim):
    spec = api.KVCacheSpec(
        num_pages=3, page_size=32, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=np.dtype(kv_dtype)
    )
    kv_BC2KH = np.random.default_rng(0).normal(0.0, 30.0, (3, 32, 2, num_kv_heads, head_dim)).astype(spec.dtype)
    kv_pages = api.pages_from_tokens(kv_BC2KH, implementation)
    assert kv_pages.shape == api.kv_cache_shape(spec, implementation)
    assert kv_pages.dtype == spec.dtype
    back_BC2KH = np.asarray(api.tokens_from_pages(kv_pages, num_kv_heads, head_dim, implementation))
    np.testing.assert_array_equal(bits(back_BC2KH), bits(kv_BC2KH))


def test_pages_are_seen_as_those_of_smaller_heads_without_a_copy():
    kv_pages = np.arange(3 * 4 * 8 * 64, dtype=np.float32).reshape(3, 4, 8, 64)  # 2 heads of 64
    view = api.view_pages(kv_pages, 8, num_kv_heads=1, head_dim=32, implementation="xla")
    assert view.shape == (3 * 4, 2, 8, 32)
    for page in range(3):
        assert np.array_equal(view[4 * page : 4 * page + 4].ravel(), kv_pages[page].ravel())
    with pytest.raises(ValueError, match=r"page of shape \(4, 8, 64\) is not made up of pages of shape \(6, 8, 64\)"):
        api.view_pages(kv_pages, 8, num_kv_heads=3, head_dim=64, implementation="xla")
