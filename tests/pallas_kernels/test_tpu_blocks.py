"""Block sizes of the TPU kernel: the rule's are sound for every shape, and the table's rows are what is chosen."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from attention_runs import tpu_abstract_mesh
from test_tpu_compile import MODELS, Heads, every_shape

from jaxllm.pallas_kernels.ragged_paged_attention import tpu_blocks, tpu_chip
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_blocks import Blocks
from jaxllm.pallas_kernels.ragged_paged_attention.tpu_layout import Layout
from jaxllm.pallas_kernels.tpu_target import CHIPS

KV_DTYPES = ["bfloat16", "float32", "int8", "float8_e4m3fn"]
MHA = {f"MHA {n}": Heads(num_heads=n, num_kv_heads=n, head_dim=128) for n in (32, 40)}


def layout_of(heads: Heads, *, kv_dtype: str = "bfloat16", page_size: int = 64, q_dtype: str = "bfloat16") -> Layout:
    return Layout(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        page_size=page_size,
        q_dtype=jnp.dtype(q_dtype),
        kv_dtype=jnp.dtype(kv_dtype),
    )


def assert_sound(layout: Layout, blocks: Blocks, chip: str | None) -> None:
    sizes = dataclasses.asdict(blocks)
    assert all(size.bit_count() == 1 for size in sizes.values()), blocks
    assert min(blocks.decode_tokens, blocks.chunk_tokens) >= 128
    assert blocks.chunk_queries * layout.rows_per_token % 128 == 0
    for fetch, product in ((blocks.decode_fetch, blocks.decode_tokens), (blocks.chunk_fetch, blocks.chunk_tokens)):
        assert fetch % layout.page_size == 0
        assert fetch % product == 0
    assert blocks.decode_tokens <= tpu_blocks.MAX_DECODE_TOKENS
    for decode_only in (True, False):
        needed = tpu_blocks.needed_bytes(layout, blocks, decode_only=decode_only)
        assert needed <= tpu_chip.vmem_bytes(chip)


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("chip", [*CHIPS, None])
def test_the_rule_is_sound_for_every_model(chip, kv_dtype, page_size):
    for heads, name in every_shape().items():
        layout = layout_of(heads, kv_dtype=kv_dtype, page_size=page_size)
        if page_size < layout.group:
            continue
        blocks = tpu_blocks.rule(layout, chip)
        assert_sound(layout, blocks, chip)
        if page_size <= 64 and kv_dtype != "float32":
            assert tpu_blocks.vmem_bytes(layout, blocks) <= tpu_chip.vmem_bytes(chip) // 2, name


@pytest.mark.parametrize("heads", MHA.values(), ids=MHA)
@pytest.mark.parametrize("chip", CHIPS)
def test_many_heads_fit(chip, heads):
    layout = layout_of(heads)
    assert_sound(layout, tpu_blocks.rule(layout, chip), chip)


def test_what_cannot_fit_is_refused_by_name():
    layout = layout_of(MHA["MHA 40"], kv_dtype="float32")
    with pytest.raises(
        ValueError, match=r"40/40 heads of 128.* float32 and pages of 64 .* v7x has 64 MiB: take smaller"
    ):
        tpu_blocks.choose(layout, "v7x")
    assert_sound(layout, tpu_blocks.choose(layout, "v6e"), "v6e")


def test_the_rule_fetches_what_hides_a_latency_and_keeps_scores_in_registers():
    layout = layout_of(MODELS["Llama-3.1-8B"])
    blocks = tpu_blocks.rule(layout, "v6e")
    assert blocks.decode_fetch * layout.token_bytes == 2 << 20
    assert tpu_blocks.rule(layout, "v7x").decode_fetch * layout.token_bytes == 4 << 20
    assert blocks.decode_tokens // 128 * layout.num_tile_heads == 16
    assert blocks.chunk_fetch * layout.token_bytes <= 4 << 20
    one_head = layout_of(Heads(num_heads=8, num_kv_heads=1, head_dim=128))
    assert tpu_blocks.rule(one_head, "v6e").decode_tokens == tpu_blocks.MAX_DECODE_TOKENS


def rows() -> list[tuple[str, str]]:
    return [(chip, key) for chip, of_chip in tpu_blocks.table().items() for key in of_chip]


def layout_of_key(key: str, *, q_dtype: str = "bfloat16") -> Layout:
    num_heads, num_kv_heads, head_dim, kv_dtype, page_size = key.split("/")
    heads = Heads(num_heads=int(num_heads), num_kv_heads=int(num_kv_heads), head_dim=int(head_dim))
    return layout_of(heads, kv_dtype=kv_dtype, page_size=int(page_size), q_dtype=q_dtype)


@pytest.mark.parametrize(("chip", "key"), rows())
def test_a_row_of_the_table_is_sound_and_chosen_and_differs_from_the_rule(chip, key):
    layout = layout_of_key(key)
    assert chip in CHIPS
    assert tpu_blocks.key(layout) == key
    row = Blocks(**json.loads(tpu_blocks.TABLE.read_text())[chip][key])
    assert_sound(layout, row, chip)
    assert tpu_blocks.choose(layout, chip) == row != tpu_blocks.rule(layout, chip)


def test_the_table_is_sorted():
    found = json.loads(tpu_blocks.TABLE.read_text())
    assert list(found) == sorted(found)
    assert all(list(of_chip) == sorted(of_chip) for of_chip in found.values())


@pytest.fixture
def table_of_one_row(monkeypatch):
    layout = layout_of(MODELS["Llama-3.1-8B"])
    row = Blocks(decode_fetch=256, decode_tokens=128, chunk_fetch=512, chunk_tokens=128, chunk_queries=32)
    monkeypatch.setattr(tpu_blocks, "table", lambda: {"v6e": {tpu_blocks.key(layout): row}})
    return layout, row


def test_a_row_is_taken_for_its_own_chip_and_shape_only(table_of_one_row):
    layout, row = table_of_one_row
    assert tpu_blocks.choose(layout, "v6e") == row != tpu_blocks.rule(layout, "v6e")
    for other in ({"num_heads": 64}, {"page_size": 32}, {"kv_dtype": jnp.dtype("float32")}):
        assert tpu_blocks.choose(changed := dataclasses.replace(layout, **other), "v6e") == tpu_blocks.rule(
            changed, "v6e"
        )
    for chip in ("v5e", "v4", None):
        assert tpu_blocks.choose(layout, chip) == tpu_blocks.rule(layout, chip)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_chip_has_its_name_and_its_memory(chip):
    assert tpu_chip.name() is None
    with jax.sharding.use_abstract_mesh(tpu_abstract_mesh(chip)):
        assert tpu_chip.name() == chip
        assert tpu_chip.vmem_bytes(chip) == tpu_chip.this_chip().vmem_capacity_bytes
