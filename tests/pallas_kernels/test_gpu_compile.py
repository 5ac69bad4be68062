"""The GPU kernels through the real compiler, for cards that are not there: they fit, no register is spilled, and caches
stay where they are."""

from pathlib import Path

import pytest
from gpu_compilation import compile_in_child

SCRIPT = Path(__file__).with_name("gpu_attention_programs.py")
LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}  # Groups of three: tiles of 8 heads hold parts of them.
GEMMA = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "sliding_window": 512}
GPT_OSS = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "sliding_window": 128, "has_sinks": True}

ALL_AT_ONCE = {"page_size": 16, "sliding_window": 300, "has_sinks": True, "soft_cap": 30.0}


def heads(group: int, *, head_dim: int) -> dict:
    num_kv_heads = 1 if head_dim > 128 else 2
    return {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


# Thread blocks of each kernel on a multiprocessor: see `gpu_blocks`.
TWO_PACKED, ONE_PACKED = {"packed": 2, "tiles": 1}, {"packed": 1, "tiles": 1}

QUICK = [
    ("h200", LLAMA_8B | {"num_devices": 2}, TWO_PACKED),  # Each has half of the heads.
    # What has come closest to more registers than there are.
    ("h200", heads(3, head_dim=256) | ALL_AT_ONCE | {"kv_dtype": "float8_e4m3fn"}, ONE_PACKED),
]
NIGHTLY = [
    (card, model | options, blocks)
    for card in ("h200", "h100")
    for model, blocks in ((LLAMA_8B, TWO_PACKED), (SMOLLM2, TWO_PACKED), (GEMMA, ONE_PACKED), (GPT_OSS, TWO_PACKED))
    for options in (
        {},
        {"page_size": 16},
        {"page_size": 128, "q_dtype": "float16", "soft_cap": 30.0},
        {"kv_dtype": "int8"},
        {"kv_dtype": "float8_e4m3fn", "page_size": 32},
        {"kv_dtype": "float8_e5m2", "decode_only": True},
    )
]
NIGHTLY += [
    ("h100", SMOLLM2 | {"decode_only": True, "q_dtype": "float16", "page_size": 16}, TWO_PACKED),
    ("h200", LLAMA_8B | {"decode_only": True}, TWO_PACKED),
    ("h200", GPT_OSS | {"decode_only": True, "kv_dtype": "float8_e4m3fn"}, TWO_PACKED),
]
NIGHTLY += [
    ("h200", heads(group, head_dim=head_dim) | ALL_AT_ONCE | options, ONE_PACKED if head_dim > 128 else TWO_PACKED)
    for head_dim in (64, 128, 256)
    for group in (1, 3, 5, 12, 16)
    for options in (
        {},
        {"kv_dtype": "int8"},
        {"kv_dtype": "float8_e4m3fn", "q_dtype": "float16"},
        {"kv_dtype": "float8_e5m2", "decode_only": True},
        {"kv_dtype": "float8_e4m3fn", "page_size": 64, "sliding_window": None},
    )
]


def check(suite: list[tuple[str, dict, dict]], *, timeout_s: float) -> None:
    found = compile_in_child(SCRIPT, [(card, options) for card, options, _ in suite], timeout_s=timeout_s)
    for (card, options, blocks_per_sm), program in zip(suite, found, strict=True):
        where = f"{card} {options}"
        decode_only = options.get("decode_only", False)
        kernels = {name.removeprefix("paged_attention_"): k for name, k in program["kernels"].items()}
        assert set(kernels) == {"write", "packed", "combine"} | (set() if decode_only else {"tiles"}), where
        for name, kernel in kernels.items():
            assert kernel["stack_bytes"] == kernel["spill_bytes"] == 0, (where, name)
            assert kernel["blocks_per_sm"] >= blocks_per_sm.get(name, 1), (where, name)
            assert (kernel["num_wgmma"] > 0) == (name in ("packed", "tiles")), (where, name)
        assert program["aliased_bytes"] >= program["cache_bytes"], where
        assert program["collectives"] == [], where
        assert program["copies_of_pages"] == program["copies_of_tokens"] == [], where


def test_kernels_fit_the_card_and_update_the_cache_in_place():
    check(QUICK, timeout_s=900)


@pytest.mark.nightly
def test_kernels_of_many_kinds_fit_the_card():
    check(NIGHTLY, timeout_s=7200)
