"""Every implementation of ragged paged attention against a numpy definition and the reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape, ragged_paged_attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


@functools.cache
def jitted(implementation: str, options: tuple[tuple[str, Any], ...]) -> Callable:
    """One function for each set of static options, so that cases of the same shapes are compiled once."""
    # The reference is here to be compared with: quick compilation is worth more than quick code.
    compiler_options = {"xla_backend_optimization_level": 0} if implementation == "reference" else {}
    call = functools.partial(ragged_paged_attention, implementation=implementation, **dict(options))
    return jax.jit(call, compiler_options=compiler_options)


@dataclasses.dataclass
class Case:
    """A step over `rows` of (tokens in the step, tokens in the sequence), drawn from a seed.

    Most are padded to the same T, S and P, so that they share compiled functions.
    """

    rows: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    num_seqs: int = 8
    num_tokens: int = 192
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    options: dict = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        S, T = self.num_seqs, self.num_tokens
        K, H = self.num_kv_heads, self.head_dim
        P = 304 // self.page_size + 1
        spec = KVCacheSpec(
            num_pages=S * P + 1,
            page_size=self.page_size,
            num_kv_heads=K,
            head_dim=H,
            dtype=jnp.dtype(self.kv_dtype),
        )
        self.page_table = np.zeros((S, P), np.int32)
        pages = rng.permutation(spec.num_pages - 1) + 1
        for s, (_, kv) in enumerate(self.rows):
            needed = -(-kv // self.page_size)
            self.page_table[s, :needed], pages = pages[:needed], pages[needed:]
        padding = [0] * (S - len(self.rows))
        self.kv_lens = np.array([kv for _, kv in self.rows] + padding, np.int32)
        q_lens = np.array([q for q, _ in self.rows] + padding)
        self.cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        self.q = rng.standard_normal((T, self.num_heads, H)).astype(np.float32)
        self.k = rng.standard_normal((T, K, H)).astype(np.float32)
        self.v = rng.standard_normal((T, K, H)).astype(np.float32)
        # Whole sequences, of which all but the step's tokens are in the cache already.
        self.history = [rng.standard_normal((2, kv, K, H)).astype(np.float32) for _, kv in self.rows]
        cache = np.full(kv_cache_shape(spec), np.nan, np.float32)
        for s, (q, kv) in enumerate(self.rows):
            start = self.cu_q_lens[s]
            self.history[s][:, kv - q :] = self.k[start : start + q], self.v[start : start + q]
            for t in range(kv - q):
                page, slot = self.page_table[s, t // self.page_size], t % self.page_size
                cache[page, :, slot] = self.history[s][:, t].reshape(2 * K, H)
        if self.kv_dtype == "int8":
            cache = np.clip(np.round(np.nan_to_num(cache) / self.options["k_scale"]), -128, 127)
        self.cache = jnp.asarray(cache, self.kv_dtype)

    def run(self, implementation: str, **changes) -> tuple[np.ndarray, np.ndarray]:
        options = {"sm_scale": self.head_dim**-0.5, **self.options, **changes}
        arrays = {name: options.pop(name) for name in ("sinks_N", "k_scale", "v_scale") if name in options}
        call = jitted(implementation, tuple(sorted(options.items())))
        out, cache = call(
            *(jnp.asarray(x, self.q_dtype) for x in (self.q, self.k, self.v)),
            self.cache,
            self.kv_lens,
            self.page_table,
            self.cu_q_lens,
            np.array([len(self.rows)], np.int32),
            **arrays,
        )
        return np.asarray(out, np.float32), np.asarray(cache.astype(jnp.float32))

    def expected(self) -> np.ndarray:
        """Attention by its definition, one token and one head at a time, in float64."""
        out = np.zeros(self.q.shape)
        window = self.options.get("sliding_window") or 10**9
        cap, sinks = self.options.get("soft_cap"), self.options.get("sinks_N")
        for s, (q_len, kv_len) in enumerate(self.rows):
            for j in range(q_len):
                t, position = self.cu_q_lens[s] + j, kv_len - q_len + j
                seen = slice(max(0, position - window + 1), position + 1)
                for n in range(self.num_heads):
                    k, v = self.history[s][:, seen, n // (self.num_heads // self.num_kv_heads)].astype(np.float64)
                    scores = k @ self.q[t, n] * self.head_dim**-0.5
                    scores = scores if cap is None else cap * np.tanh(scores / cap)
                    weights = np.exp(scores - scores.max())
                    total = weights.sum() + (0 if sinks is None else np.exp(sinks[n] - scores.max()))
                    out[t, n] = weights @ v / total
        return out


DECODES = [(1, 1), (1, 7), (1, 33), (1, 4), (1, 64)]
CHUNKS = [(5, 5), (130, 130), (9, 40), (2, 19)]
MIXED = [(1, 9), (40, 45), (1, 70), (3, 3), (140, 300), (1, 2)]
SINKS = np.array([0.3, -1.0, 2.0, 0.0], np.float32)

CASES = {
    "decodes": Case(DECODES),
    "chunks": Case(CHUNKS),
    "mixed": Case(MIXED),
    "no padding": Case(MIXED, num_seqs=6, num_tokens=186),
    "many decodes": Case([(1, 1 + 7 * i % 90) for i in range(50)], page_size=8, num_seqs=51, num_tokens=53),
    "mha": Case(MIXED, num_heads=3, num_kv_heads=3, head_dim=24),
    "mqa": Case(MIXED, num_heads=4, num_kv_heads=1, page_size=16),
    "big pages": Case(MIXED, page_size=64),
    "window": Case(MIXED, options={"sliding_window": 10}),
    "window of one": Case(MIXED, options={"sliding_window": 1}),
    "soft cap": Case(MIXED, options={"soft_cap": 0.7}),
    "sinks": Case(MIXED, options={"sinks_N": SINKS}),
    "window, soft cap and sinks": Case(MIXED, options={"sliding_window": 33, "soft_cap": 2.0, "sinks_N": SINKS}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_equals_the_numpy_definition(name, implementation):
    case = CASES[name]
    out, _ = case.run(implementation)
    np.testing.assert_allclose(out, case.expected(), atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["mixed", "window, soft cap and sinks"])
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "options"),
    [
        ("bfloat16", "bfloat16", {}),
        ("float32", "bfloat16", {}),
        ("float16", "float16", {}),
        ("float32", "int8", {"k_scale": 0.04, "v_scale": 0.04}),
        ("float32", "float8_e4m3fn", {"k_scale": 1.0, "v_scale": 1.0}),
        ("float32", "float8_e5m2", {"k_scale": np.array([1.0, 0.5], np.float32), "v_scale": 1.0}),
    ],
)
def test_xla_equals_the_reference_in_every_dtype(name, q_dtype, kv_dtype, options):
    base = CASES[name]
    if kv_dtype == "float8_e5m2":  # A scale per head: start from an empty cache, which scales what it holds.
        base = dataclasses.replace(base, rows=[(q, q) for q, _ in base.rows])
    case = dataclasses.replace(base, q_dtype=q_dtype, kv_dtype=kv_dtype, options={**base.options, **options})
    out, cache = case.run("xla")
    expected, expected_cache = case.run("reference")
    np.testing.assert_array_equal(cache, expected_cache)
    tolerance = max(TOLERANCE[q_dtype], TOLERANCE.get(kv_dtype, 0.0))  # The dots run in the narrower of the two.
    np.testing.assert_allclose(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_quantized_cache_gives_nearly_the_unquantized_answer(implementation):
    case = Case(MIXED, kv_dtype="int8", options={"k_scale": 0.04, "v_scale": 0.04})
    out, _ = case.run(implementation)
    np.testing.assert_allclose(out, case.expected(), atol=0.05)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_only_the_new_tokens_are_written(implementation):
    case = CASES["mixed"]
    _, cache = case.run(implementation)
    changed = ~((cache == np.asarray(case.cache)) | (np.isnan(cache) & np.isnan(np.asarray(case.cache))))
    written = {tuple(x) for x in np.argwhere(changed.any((1, 3)))}
    expected = {
        (case.page_table[s, t // case.page_size], t % case.page_size)
        for s, (q, kv) in enumerate(case.rows)
        for t in range(kv - q, kv)
    }
    assert written == expected


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_padding_gives_zeros(implementation):
    case = CASES["mixed"]
    out, _ = case.run(implementation)
    num_tokens = sum(q for q, _ in case.rows)
    assert out[:num_tokens].any(axis=(1, 2)).all()
    assert not out[num_tokens:].any()


def test_the_promise_of_decodes_only_changes_nothing():
    case = Case(DECODES, num_seqs=8, num_tokens=8)
    np.testing.assert_array_equal(case.run("xla", decode_only=True)[0], case.run("xla")[0])


def test_splitting_a_prompt_into_chunks_changes_nothing():
    whole = Case([(150, 150)])
    expected, _ = whole.run("xla")
    cache, outs = whole.cache, []
    for start, end in ((0, 64), (64, 65), (65, 150)):
        part = dataclasses.replace(whole)
        part.page_table, part.cache = whole.page_table, cache
        part.kv_lens[0], part.cu_q_lens[1:] = end, end - start
        part.q, part.k, part.v = (np.roll(x, -start, axis=0) for x in (whole.q, whole.k, whole.v))
        out, cache = part.run("xla")
        outs.append(out[: end - start])
    np.testing.assert_allclose(np.concatenate(outs), expected[:150], atol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((192, 5, 16))}, "multiple of the 2 KV heads"),
        ({"k": np.zeros((192, 2, 8))}, r"must both be \[T, K, H\]"),
        ({"kv_lens": np.zeros(3, np.int32)}, "kv_lens_S has shape"),
        ({"cu_q_lens": np.zeros(9, np.int64)}, "expected int32"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    case = dataclasses.replace(CASES["mixed"])
    for name, value in change.items():
        setattr(case, name, value)
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        case.run("xla")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"decode_only": True}, "as many tokens as rows"),
        ({"sinks_N": np.zeros(3)}, "sinks_N has shape"),
        ({"k_scale": np.zeros(3)}, "k_scale has shape"),
        ({"implementation": "cuda"}, "'cuda' is not known"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    case = CASES["mixed"]
    with pytest.raises(ValueError, match=message):
        case.run(options.pop("implementation", "xla"), **options)
