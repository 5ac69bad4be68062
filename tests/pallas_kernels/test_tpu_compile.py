"""The TPU kernel through the real compiler, for every chip: it lowers, fits, and updates the cache where it is."""

import functools
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from attention_runs import TPU_KINDS
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape, ragged_paged_attention
from jaxllm.pallas_kernels.tpu_target import CHIPS, tpu_mesh

LIBTPU = Path(__file__).parents[2] / ".libtpu" / "libtpu" / "libtpu.so"
NUM_SEQS, NUM_CHUNK_TOKENS, PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES = 64, 1024, 64, 128, 2048


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A model's attention, from its config.json."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    has_sinks: bool = False


MODELS = {
    "Llama-3.1-8B": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "Llama-3.1-70B": Heads(num_heads=64, num_kv_heads=8, head_dim=128),
    "Qwen3-0.6B": Heads(num_heads=16, num_kv_heads=8, head_dim=128),
    "Qwen3-8B": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "Qwen3-32B": Heads(num_heads=64, num_kv_heads=8, head_dim=128),
    "Gemma-3-270M": Heads(num_heads=4, num_kv_heads=1, head_dim=256, sliding_window=512),
    "Gemma-3-27B": Heads(num_heads=32, num_kv_heads=16, head_dim=128, sliding_window=1024),
    "SmolLM2-135M": Heads(num_heads=9, num_kv_heads=3, head_dim=64),
    "gpt-oss-20B": Heads(num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=128, has_sinks=True),
}


def every_shape() -> dict[Heads, str]:
    """What a device holds of each model at tensor parallelism 1, 4 and 8, where that divides; the same ones once."""
    shapes: dict[Heads, str] = {}
    for name, heads in MODELS.items():
        for parts in (1, 4, 8):
            if heads.num_kv_heads % parts == 0:
                local = Heads(
                    num_heads=heads.num_heads // parts,
                    num_kv_heads=heads.num_kv_heads // parts,
                    head_dim=heads.head_dim,
                    sliding_window=heads.sliding_window,
                    has_sinks=heads.has_sinks,
                )
                shapes[local] = f"{shapes[local]}, {name}/{parts}" if local in shapes else f"{name}/{parts}"
    return shapes


def assert_compiles(chip: str, heads: Heads, kv_dtype: str, *, decode_only: bool) -> None:
    mesh = tpu_mesh(chip, libtpu=LIBTPU)
    sharding = NamedSharding(mesh, PartitionSpec())
    spec = KVCacheSpec(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=jnp.dtype(kv_dtype),
    )

    def struct(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    T = NUM_SEQS if decode_only else NUM_CHUNK_TOKENS
    new_tokens = struct("bfloat16", T, heads.num_kv_heads, heads.head_dim)
    options = {"sinks_N": struct("float32", heads.num_heads)} if heads.has_sinks else {}
    if spec.dtype.itemsize == 1:
        options |= {"k_scale": struct("float32"), "v_scale": struct("float32")}
    attend = functools.partial(
        ragged_paged_attention,
        sm_scale=heads.head_dim**-0.5,
        sliding_window=heads.sliding_window,
        decode_only=decode_only,
    )
    with jax.set_mesh(mesh):
        pages_shape = kv_cache_shape(spec)
        lowered = jax.jit(attend, donate_argnums=3).lower(
            struct("bfloat16", T, heads.num_heads, heads.head_dim),
            new_tokens,
            new_tokens,
            struct(kv_dtype, *pages_shape),
            struct("int32", NUM_SEQS),
            struct("int32", NUM_SEQS, PAGES_PER_SEQ),
            struct("int32", NUM_SEQS + 1),
            struct("int32", 1),
            **options,
        )
        compiled = lowered.compile()
        vmem_capacity_bytes = pltpu.get_tpu_info().vmem_capacity_bytes

    assert compiled.memory_analysis().alias_size_in_bytes == prod(pages_shape) * spec.dtype.itemsize
    hlo = compiled.as_text()
    assert opcodes_giving(pages_shape, hlo) <= {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}
    assert 0 < kernel_vmem_bytes(hlo) <= vmem_capacity_bytes


def opcodes_giving(shape: tuple[int, ...], hlo: str) -> set[str]:
    """What makes arrays of a shape: `%name = type{layout} opcode(...)`."""
    instructions = [re.match(r"\s*(?:ROOT )?%\S+ = (.*?[\])}]) ([a-z][a-z0-9-]*)\(", line) for line in hlo.splitlines()]
    text = f"[{','.join(map(str, shape))}]"
    return {match[2] for match in instructions if match is not None and text in match[1]}


def kernel_vmem_bytes(hlo: str) -> int:
    """What the compiler has laid out in VMEM, memory space 1, for the one kernel of a program."""
    (kernel,) = [line for line in hlo.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    (size,) = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', kernel)
    return int(size)


@pytest.mark.parametrize("chip", CHIPS)
def test_described_chips_are_those_that_are_simulated(chip):
    assert tpu_mesh(chip, libtpu=LIBTPU).devices.flat[0].device_kind == TPU_KINDS[chip]


@pytest.mark.parametrize(
    ("chip", "model", "kv_dtype", "decode_only"),
    [
        ("v6e", "Llama-3.1-8B", "bfloat16", True),
        ("v6e", "Llama-3.1-8B", "bfloat16", False),
        ("v5e", "SmolLM2-135M", "bfloat16", True),
        ("v5p", "Gemma-3-270M", "bfloat16", False),
        ("v7x", "gpt-oss-20B", "float8_e4m3fn", True),
    ],
)
def test_compiles(chip, model, kv_dtype, decode_only):
    assert_compiles(chip, MODELS[model], kv_dtype, decode_only=decode_only)


@pytest.mark.nightly
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("heads", [pytest.param(heads, id=name) for heads, name in every_shape().items()])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_model(chip, heads, decode_only):
    assert_compiles(chip, heads, "bfloat16", decode_only=decode_only)


@pytest.mark.nightly
@pytest.mark.parametrize("decode_only", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "SmolLM2-135M"])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_dtype(chip, model, kv_dtype, decode_only):
    assert_compiles(chip, MODELS[model], kv_dtype, decode_only=decode_only)
