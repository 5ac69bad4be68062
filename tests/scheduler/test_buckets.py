"""Few buckets, and each step fits one of them."""

import pytest

from jaxllm.scheduler import Bucket, declare_buckets, pick_bucket
from jaxllm.scheduler.buckets import compile_order


def test_the_buckets_of_a_small_engine():
    assert declare_buckets(512, 32, 4) == (
        *(Bucket.decodes(size) for size in (4, 8, 16, 32)),
        *(Bucket.mixed(size, 32) for size in (128, 512)),
    )


def test_the_buckets_of_a_large_engine():
    assert declare_buckets(8192, 256, 8) == (
        *(Bucket.decodes(size) for size in (8, 16, 32, 64, 128, 256)),
        *(Bucket.mixed(size, 256) for size in (512, 2048, 8192)),
    )


@pytest.mark.parametrize("with_small_mixed", [False, True])
@pytest.mark.parametrize("min_tokens", [1, 4])
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_num_seqs"),
    [(1, 1), (4, 4), (8, 8), (9, 8), (20, 16), (64, 1), (500, 3), (512, 100), (64, 64), (2048, 256)],
)
def test_every_step_within_the_bounds_fits(max_num_batched_tokens, max_num_seqs, min_tokens, with_small_mixed):
    buckets = declare_buckets(max_num_batched_tokens, max_num_seqs, min_tokens, with_small_mixed=with_small_mixed)
    assert len(buckets) <= (17 if with_small_mixed else 12)
    assert list(buckets) == sorted(set(buckets))
    assert min(bucket.num_tokens for bucket in buckets) >= min_tokens
    for num_seqs in {1, 2, max_num_seqs // 2 + 1, max_num_seqs}:
        if num_seqs <= max_num_seqs:
            bucket = pick_bucket(buckets, num_seqs, num_seqs, max_q_len=1)
            assert bucket.num_tokens == bucket.num_seqs >= num_seqs
            bucket = pick_bucket(buckets, max_num_batched_tokens, num_seqs, max_q_len=2)
            assert not bucket.is_decode_only
            assert pick_bucket(buckets[-1:], num_seqs, num_seqs, max_q_len=1) == buckets[-1]
            for num_tokens in range(num_seqs + 1, max_num_batched_tokens + 1):
                bucket = pick_bucket(buckets, num_tokens, num_seqs, max_q_len=num_tokens - num_seqs + 1)
                assert not bucket.is_decode_only
                assert all(
                    bucket.num_tokens <= other.num_tokens
                    for other in buckets
                    if other.num_tokens >= num_tokens and not other.is_decode_only
                ), "padded more than the estimate of its time says"


def test_small_mixed_buckets_are_few_and_leave_room_for_a_chunk_beside_each_bucket_of_decodes():
    buckets = declare_buckets(512, 32, 4, with_small_mixed=True)
    small = set(buckets) - set(declare_buckets(512, 32, 4))
    assert small == {Bucket.mixed(size, min(size, 32)) for size in (24, 48, 96)}
    buckets = declare_buckets(8192, 256, 8, with_small_mixed=True)
    small = set(buckets) - set(declare_buckets(8192, 256, 8))
    assert small == {Bucket.mixed(size, min(size, 256)) for size in (24, 48, 96, 192, 384)}
    for num_decodes in (16, 32, 64, 128, 256):
        bucket = pick_bucket(buckets, num_decodes + 3, num_decodes, max_q_len=4)
        assert bucket.num_tokens == 1.5 * num_decodes


def test_decodes_take_a_bucket_of_their_own_where_a_small_mixed_one_has_fewer_tokens():
    buckets = declare_buckets(512, 32, 4, with_small_mixed=True)
    assert pick_bucket(buckets, 20, 20, max_q_len=1) == Bucket.decodes(32)
    assert pick_bucket([Bucket.mixed(24, 24), Bucket.mixed(512, 32)], 20, 20, max_q_len=1) == Bucket.mixed(24, 24)
    assert pick_bucket(buckets, 24, 23, max_q_len=2) == Bucket.mixed(24, 24)


def test_a_step_gets_the_cheapest_bucket_that_is_ready():
    buckets = declare_buckets(512, 32, 4)
    assert pick_bucket(buckets, 3, 3, max_q_len=1) == Bucket.decodes(4)
    assert pick_bucket(buckets, 5, 5, max_q_len=1) == Bucket.decodes(8)
    assert pick_bucket(buckets, 5, 1, max_q_len=5) == Bucket.mixed(128, 32)
    assert pick_bucket(buckets[-1:], 3, 3, max_q_len=1) == Bucket.mixed(512, 32)
    with pytest.raises(ValueError, match="no bucket fits a step of 513 tokens in 1 rows"):
        pick_bucket(buckets, 513, 1, max_q_len=513)


def test_a_bucket_says_what_rows_its_steps_may_have_whatever_its_size():
    assert Bucket.decodes(64) != Bucket.mixed(64, 64)
    buckets = declare_buckets(64, 64, 4)
    assert buckets[-2:] == (Bucket.decodes(64), Bucket.mixed(64, 64))
    assert pick_bucket(buckets, 64, 64, max_q_len=1) == Bucket.decodes(64)
    assert pick_bucket(buckets, 64, 63, max_q_len=2) == Bucket.mixed(64, 64)
    verifying = Bucket(max_q_len=4, num_tokens=64, num_seqs=16)
    assert pick_bucket([*buckets, verifying], 60, 16, max_q_len=4) == verifying
    assert pick_bucket([*buckets, verifying], 60, 16, max_q_len=5) == Bucket.mixed(64, 64)


def sizes_of(buckets):
    return [f"{'d' if bucket.is_decode_only else 'm'}{bucket.num_tokens}" for bucket in buckets]


def test_what_most_steps_need_is_compiled_first():
    buckets = declare_buckets(512, 32, 4)
    assert sizes_of(compile_order(buckets, for_short_steps=False)) == ["m512", "d32", "d16", "d8", "d4", "m128"]
    buckets = declare_buckets(512, 32, 4, with_small_mixed=True)
    order = compile_order(buckets, for_short_steps=True)
    assert sizes_of(order) == ["m512", "d32", "m48", "m24", "d16", "d8", "d4", "m128", "m96"]
    # After three of them a chunk has a short step beside any number of decodes.
    for num_decodes in range(1, 32):
        assert pick_bucket(order[:3], num_decodes + 4, num_decodes + 1, max_q_len=4).num_tokens == 48


@pytest.mark.parametrize("with_small_mixed", [False, True])
@pytest.mark.parametrize(("max_num_batched_tokens", "max_num_seqs"), [(1, 1), (8, 8), (64, 64), (500, 3), (8192, 256)])
def test_each_program_is_compiled_once_and_the_first_fits_any_step(
    max_num_batched_tokens, max_num_seqs, with_small_mixed
):
    buckets = declare_buckets(max_num_batched_tokens, max_num_seqs, 4, with_small_mixed=with_small_mixed)
    order = compile_order(buckets, for_short_steps=with_small_mixed)
    assert sorted(order) == list(buckets)
    assert order[0] == buckets[-1]
    assert order[1] == max(bucket for bucket in buckets if bucket.is_decode_only)
