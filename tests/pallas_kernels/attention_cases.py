"""Random cases of ragged paged attention, each from a seed: what a program is compiled for, and what a step holds.

Whatever no implementation may look at is poisoned: unwritten slots, unused pages, the null page and padding tokens are
NaN, or the extreme values where a dtype has no NaN; padding rows have absurd lengths and other rows' pages.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

HEAD_DIMS = (64, 80, 96, 128, 256)
HEAD_GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)  # G
KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
PAGE_SIZES = (16, 32, 64, 128, 256)
STYLES = ("mixed", "full", "decodes", "verification", "one chunk")  # What rows a step has.
QUERY_STD = 3.0  # Of the scores too. A few tokens take most of the weight, so that each token missed is seen.


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one program is compiled for: sizes, dtypes, and options that are static. Many cases share it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    num_pages: int
    num_seqs: int
    num_tokens: int
    q_dtype: str
    kv_dtype: str
    scales: str | None = None  # "scalar" or "heads"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    decode_only: bool = False

    def __str__(self) -> str:
        names = [f"{self.num_heads}of{self.num_kv_heads}x{self.head_dim}", f"page{self.page_size}", self.kv_dtype]
        names += [f"window{self.sliding_window}"] if self.sliding_window else []
        names += [f"cap{self.soft_cap:g}"] if self.soft_cap else []
        names += ["sinks"] if self.has_sinks else []
        names += [f"{self.scales}-scale"] if self.scales else []
        names += ["decode"] if self.decode_only else []
        return "-".join(names)

    @property
    def static_options(self) -> dict[str, Any]:
        """The keyword arguments of `ragged_paged_attention` that are no arrays."""
        return {
            "sm_scale": self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
            "decode_only": self.decode_only,
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step over `rows` of (tokens in the step, tokens in the sequence)."""

    program: Program
    rows: Sequence[tuple[int, int]]
    q_TNH: np.ndarray
    k_TKH: np.ndarray
    v_TKH: np.ndarray
    kv_BC2KH: np.ndarray  # The cache before the step, as tokens of pages.
    kv_lens_S: np.ndarray
    page_table_SP: np.ndarray
    cu_q_lens: np.ndarray
    array_options: dict[str, np.ndarray]  # The keyword arguments of `ragged_paged_attention` that are arrays.

    @property
    def num_seqs(self) -> np.ndarray:
        return np.array([len(self.rows)], np.int32)

    def new_tokens(self) -> Iterator[tuple[int, int, int, int]]:
        """(row, token, page, slot) of each real token of the step."""
        for s, ((q_len, kv_len), (start, _)) in enumerate(zip(self.rows, pairwise(self.cu_q_lens), strict=False)):
            for i in range(q_len):
                page, slot = divmod(kv_len - q_len + i, self.program.page_size)
                yield s, int(start) + i, int(self.page_table_SP[s, page]), slot


def draw_programs(count: int, seed: int) -> list[Program]:
    """Programs in which each value of a feature comes equally often, and values meet at random."""
    rng = np.random.default_rng(seed)

    def column(values: Sequence) -> list:
        rounds = [rng.permutation(len(values)) for _ in range(-(-count // len(values)))]
        return [values[i] for i in np.concatenate(rounds)[:count]]

    columns = {
        "head_dim": column(HEAD_DIMS),
        "group": column(HEAD_GROUPS),
        "num_kv_heads": column((1, 2, 3, 4, 8)),
        "page_size": column(PAGE_SIZES),
        "kv_dtype": column(("bfloat16", *KV_DTYPES)),  # The usual one twice.
        "q_dtype": column(("bfloat16", "float32")),
        "window_pages": column((None, None, 0, 1, 2, 5)),
        "soft_cap": column((None, None, 5.0, 30.0)),
        "has_sinks": column((False, True)),
        "scales": column(("scalar", "heads", "scalar", None)),
        "num_tokens": column((32, 64, 144)),
        "decode_only": column((False, False, True)),
    }
    return [_program(*values) for values in zip(*columns.values(), strict=True)]


def _program(
    head_dim: int,
    group: int,
    num_kv_heads: int,
    page_size: int,
    kv_dtype: str,
    q_dtype: str,
    window_pages: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    scales: str | None,
    num_tokens: int,
    decode_only: bool,
) -> Program:
    """A program of these values, or of the nearest that go together and are quick to simulate."""
    is_8_bit = np.dtype(kv_dtype).itemsize == 1
    if is_8_bit:  # A register of a TPU holds 32 slots of such a cache.
        page_size = max(page_size, 32)
    num_kv_heads = max(1, min(num_kv_heads, 2048 // (head_dim * group)))
    num_seqs = 8 if decode_only else 6
    pages_per_seq = min(1024 // page_size, 12)
    return Program(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        num_pages=num_seqs * pages_per_seq + 2,
        num_seqs=num_seqs,
        num_tokens=num_seqs if decode_only else num_tokens,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        scales=scales if is_8_bit else None,
        # Beside a border of pages, and at 0 pages of one token: its own.
        sliding_window=None if window_pages is None else window_pages * page_size + 1,
        soft_cap=soft_cap,
        has_sinks=has_sinks,
        decode_only=decode_only,
    )


def fitted(program: Program, implementation: str) -> Program:
    """The program, or for the GPU's kernels one like it of sizes and dtypes that they take."""
    if implementation != "gpu":
        return program
    # Where queries are float32, in the other of the two dtypes.
    dtype = "float16" if program.q_dtype == "float32" else "bfloat16"
    return dataclasses.replace(
        program,
        head_dim=next(size for size in (64, 128, 256) if size >= program.head_dim),
        q_dtype=dtype,
        kv_dtype=dtype if np.dtype(program.kv_dtype).itemsize > 1 else program.kv_dtype,
    )


def draw_rows(program: Program, style: str, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(tokens in the step, tokens in the sequence) of each row. Most begin or end at or beside a page's border."""
    num_rows = program.num_seqs if style == "full" else int(rng.integers(1, program.num_seqs + 1))
    if program.decode_only:
        q_lens = [1] * num_rows
    elif style == "one chunk":
        q_lens = [program.num_tokens - int(rng.integers(0, 5))]
    else:
        # Decodes, a few tokens to verify, chunks, and rows that have nothing to do.
        kinds = [(1, 1), (2, 8), (9, 80), (0, 0)]
        chances = {"decodes": [1, 0, 0, 0], "verification": [0.1, 0.9, 0, 0]}.get(style, [0.4, 0.25, 0.25, 0.1])
        q_lens, left = [], program.num_tokens
        for kind in rng.choice(len(kinds), num_rows, p=chances):
            low, high = kinds[kind]
            q_lens.append(min(int(rng.integers(low, high + 1)), left))
            left -= q_lens[-1]
        if style == "full":
            q_lens[-1] += left
    return [(q_len, _draw_kv_len(program, q_len, rng)) for q_len in q_lens]


def _draw_kv_len(program: Program, q_len: int, rng: np.random.Generator) -> int:
    page_size, most = program.page_size, program.page_size * program.pages_per_seq
    if q_len == 0 and rng.random() < 0.5:
        return 0
    border = int(rng.integers(0, program.pages_per_seq + 1)) * page_size + int(rng.integers(-2, 2))
    # The tokens of the step end at a border, begin at one, or neither.
    kv_len = (border, border + q_len, int(rng.integers(1, most + 1)))[rng.integers(3)]
    return min(max(kv_len, q_len, 1), most)


def first_visible_page(program: Program, q_len: int, kv_len: int) -> int:
    """The first page that any token of a row sees."""
    if program.sliding_window is None:
        return 0
    return max(0, kv_len - q_len - program.sliding_window + 1) // program.page_size


def draw_case(program: Program, seed: int, style: str = "mixed", rows: Sequence[tuple[int, int]] | None = None) -> Case:
    """A step of a style out of STYLES, or of given rows, whose pages lie anywhere and may share a prefix."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(program, style, rng) if rows is None else rows
    page_table_SP = _draw_page_table(program, rows, rng)
    array_options = _draw_array_options(program, rng)
    T, N, K, H = program.num_tokens, program.num_heads, program.num_kv_heads, program.head_dim
    cu_q_lens = np.zeros(program.num_seqs + 1, np.int32)
    cu_q_lens[1 : len(rows) + 1] = np.cumsum([q_len for q_len, _ in rows])
    cu_q_lens[len(rows) + 1 :] = cu_q_lens[len(rows)]
    kv_lens_S = np.full(program.num_seqs, 2**30, np.int32)
    kv_lens_S[: len(rows)] = [kv_len for _, kv_len in rows]

    def tokens(*shape: int, std: float = 1.0) -> np.ndarray:
        x = rng.normal(0.0, std, shape).astype(np.float32)
        x[cu_q_lens[-1] :] = np.nan
        return x.astype(program.q_dtype)

    return Case(
        program=program,
        rows=rows,
        # Exact in bfloat16, so that it is no question in which dtype an implementation multiplies.
        q_TNH=tokens(T, N, H, std=QUERY_STD).astype(ml_dtypes.bfloat16).astype(program.q_dtype),
        k_TKH=tokens(T, K, H),
        v_TKH=tokens(T, K, H),
        kv_BC2KH=_draw_cache(program, rows, page_table_SP, array_options, rng),
        kv_lens_S=kv_lens_S,
        page_table_SP=page_table_SP,
        cu_q_lens=cu_q_lens,
        array_options=array_options,
    )


def _draw_page_table(program: Program, rows: Sequence[tuple[int, int]], rng: np.random.Generator) -> np.ndarray:
    page_size = program.page_size
    free = list(rng.permutation(program.num_pages - 1) + 1)
    anywhere = rng.integers(0, program.num_pages, (program.num_seqs, program.pages_per_seq))
    # What no token of a row may see: mostly the null page, sometimes pages of others.
    page_table_SP = np.where(rng.random() < 0.5, 0, anywhere).astype(np.int32)
    page_table_SP[len(rows) :] = anywhere[len(rows) :]
    owned: list[slice] = []
    for s, (q_len, kv_len) in enumerate(rows):
        # Pages that left the window may have been given back.
        first_page = first_visible_page(program, q_len, kv_len) if rng.random() < 0.5 else 0
        owned.append(slice(first_page, -(-kv_len // page_size)))
        page_table_SP[s, owned[s]] = [free.pop() for _ in range(first_page, owned[s].stop)]
        if s > 0 and rng.random() < 0.5:  # A prefix in common with the row before.
            history_pages = [(kv_len - q_len) // page_size for q_len, kv_len in rows[s - 1 : s + 1]]
            shared = slice(max(first_page, owned[s - 1].start), min(history_pages))
            if shared.start < shared.stop:
                page_table_SP[s, shared] = page_table_SP[s - 1, shared]
    return page_table_SP


def _draw_array_options(program: Program, rng: np.random.Generator) -> dict[str, np.ndarray]:
    options: dict[str, np.ndarray] = {}
    if program.has_sinks:
        # Near the largest of many scores, so that sinks matter to long sequences too.
        options["sinks_N"] = rng.normal(2.5 * QUERY_STD, QUERY_STD, program.num_heads).astype(np.float32)
    if program.scales is not None:
        shape = (program.num_kv_heads,) if program.scales == "heads" else ()
        for name in ("k_scale", "v_scale"):
            options[name] = rng.uniform(0.02, 0.05, shape).astype(np.float32)
    return options


def _draw_cache(
    program: Program,
    rows: Sequence[tuple[int, int]],
    page_table_SP: np.ndarray,
    array_options: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    dtype = np.dtype(program.kv_dtype)
    shape = (program.num_pages, program.page_size, 2, program.num_kv_heads, program.head_dim)
    is_written_BC = np.zeros(shape[:2], bool)
    for s, (q_len, kv_len) in enumerate(rows):
        num_history = kv_len - q_len
        for p in range(first_visible_page(program, q_len, kv_len), -(-num_history // program.page_size)):
            is_written_BC[page_table_SP[s, p], : num_history - p * program.page_size] = True
    kv_BC2KH = rng.normal(0.0, 1.0, shape).astype(np.float32)
    for kv, name in enumerate(("k_scale", "v_scale")):
        kv_BC2KH[:, :, kv] /= np.reshape(array_options.get(name, np.float32(1)), (-1, 1))
    if dtype == np.int8:
        kv_BC2KH = np.rint(kv_BC2KH)
        poison = rng.choice([-128.0, 127.0], shape)
    else:
        poison = np.float32(np.nan)
    kv_BC2KH = np.where(is_written_BC[:, :, None, None, None], kv_BC2KH, poison)
    if dtype.itemsize == 1:
        info = np.iinfo(dtype) if dtype == np.int8 else ml_dtypes.finfo(dtype)
        kv_BC2KH = np.clip(kv_BC2KH, float(info.min), float(info.max))
    return kv_BC2KH.astype(dtype)
