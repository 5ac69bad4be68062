"""Paged attention alone: what a layer costs by the lengths that are really there, beside two bounds.

    python benchmarks/attention.py

The page table has room for `--max-model-len` tokens a row throughout, so a cost that followed the padding would not
change from line to line. The bounds: reading and writing once as many bytes as the rows' keys and values have, and as
many multiplications as the step needs at the speed of a large matrix product.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape, ragged_paged_attention


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], metavar=("N", "K", "H"))
    parser.add_argument("--rows", type=int, default=32, help="rows of a decode step (32)")
    parser.add_argument("--dtype", default="bfloat16", help="of the cache (bfloat16)")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8, help="caches to go through, so that none stays in fast memory")
    parser.add_argument("--repeats", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    _, num_kv_heads, head_dim = args.heads
    token_bytes = 2 * num_kv_heads * head_dim * jnp.dtype(args.dtype).itemsize
    flops_per_s = matrix_product_rate(args.dtype, args.repeats)
    print(f"{'step':26}{'ms/layer':>10}{'bytes ms':>10}{'flops ms':>10}{'ratio':>8}")
    steps = [(f"{args.rows} decodes of {length:,}", [(1, length)] * args.rows) for length in (64, 256, 1024, 4096)]
    mixed = [(1, int(length)) for length in np.geomspace(16, 4096, args.rows)]
    steps += [(f"{args.rows} decodes, 16 to 4,096", mixed)]
    steps += [(f"a chunk of 512 in {length:,}", [(512, length)]) for length in (512, 1024, 4096)]
    for name, rows in steps:
        layer_s = measure(args, rows)
        bytes_s = touch_time(sum(kv for _, kv in rows) * token_bytes * args.layers, args.repeats) / args.layers
        flops_s = attention_flops(rows, args.heads) / flops_per_s
        ratio = layer_s / max(bytes_s, flops_s)
        print(f"{name:26}{1e3 * layer_s:10.3f}{1e3 * bytes_s:10.3f}{1e3 * flops_s:10.3f}{ratio:8.1f}")


def measure(args: argparse.Namespace, rows: list[tuple[int, int]]) -> float:
    """Seconds a layer for a step over rows of (tokens in the step, tokens in the sequence)."""
    num_heads, num_kv_heads, head_dim = args.heads
    S, P = len(rows), -(-args.max_model_len // args.page_size)
    num_row_pages = [-(-kv // args.page_size) for _, kv in rows]
    rng = np.random.default_rng(0)
    pages = rng.permutation(sum(num_row_pages)).astype(np.int32) + 1
    page_table_SP = np.zeros((S, P), np.int32)
    for s, num_pages in enumerate(num_row_pages):
        page_table_SP[s, :num_pages], pages = pages[:num_pages], pages[num_pages:]
    spec = KVCacheSpec(
        num_pages=sum(num_row_pages) + 1,
        page_size=args.page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(args.dtype),
    )
    T = sum(q for q, _ in rows)
    q_TNH = jnp.asarray(rng.standard_normal((T, num_heads, head_dim)), jnp.float32)
    k_TKH = jnp.asarray(rng.standard_normal((T, num_kv_heads, head_dim)), jnp.float32)
    kv_lens_S = np.array([kv for _, kv in rows], np.int32)
    cu_q_lens = np.cumsum([0, *(q for q, _ in rows)]).astype(np.int32)
    attend = partial(ragged_paged_attention, sm_scale=head_dim**-0.5, decode_only=T == S)

    @partial(jax.jit, donate_argnums=0)
    def all_layers(caches: list[jax.Array], q_TNH: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        updated = []
        for cache in caches:
            out_TNH, cache = attend(
                q_TNH, k_TKH, k_TKH, cache, kv_lens_S, page_table_SP, cu_q_lens, np.array([S], np.int32)
            )
            q_TNH = q_TNH + 0.01 * out_TNH
            updated.append(cache)
        return updated, q_TNH

    caches = [jnp.zeros(kv_cache_shape(spec), spec.dtype) for _ in range(args.layers)]
    best_s = float("inf")
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        caches, _ = jax.block_until_ready(all_layers(caches, q_TNH))
        best_s = min(best_s, time.perf_counter() - start)
    return best_s / args.layers


def attention_flops(rows: list[tuple[int, int]], heads: tuple[int, int, int]) -> int:
    """Multiplications and additions of scores and outputs, what causality hides left out."""
    num_heads, _, head_dim = heads
    pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in rows)
    return 4 * pairs * num_heads * head_dim


def touch_time(num_bytes: int, repeats: int) -> float:
    """Seconds to read and write so many bytes in place."""
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    array, best_s = jnp.zeros(num_bytes // 4, jnp.int32), float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        array = jax.block_until_ready(add_one(array))
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def matrix_product_rate(dtype: str, repeats: int) -> float:
    """FLOP/s of a product of two square matrices, summed in float32."""
    size = 1024
    x = jnp.ones((size, size), dtype)
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    best_s = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(product(x, x))
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s


if __name__ == "__main__":
    main()
