"""Few buckets, and each step fits one of them."""

import pytest

from jaxllm.scheduler import Bucket, declare_buckets, pick
from jaxllm.scheduler.buckets import compile_order


def test_the_buckets_of_a_small_engine():
    assert declare_buckets(512, 32, 4) == (
        *(Bucket(size, size) for size in (4, 8, 16, 32)),
        *(Bucket(size, 32) for size in (128, 512)),
    )


def test_the_buckets_of_a_large_engine():
    assert declare_buckets(8192, 256, 8) == (
        *(Bucket(size, size) for size in (8, 16, 32, 64, 128, 256)),
        *(Bucket(size, 256) for size in (512, 2048, 8192)),
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
            bucket = pick(buckets, num_seqs, num_seqs, decode_only=True)
            assert bucket.num_tokens == bucket.num_seqs >= num_seqs
            bucket = pick(buckets, max_num_batched_tokens, num_seqs, decode_only=False)
            assert not bucket.is_decode_only
            assert pick(buckets[-1:], num_seqs, num_seqs, decode_only=True) == buckets[-1]
            for num_tokens in range(num_seqs + 1, max_num_batched_tokens + 1):
                bucket = pick(buckets, num_tokens, num_seqs, decode_only=False)
                assert not bucket.is_decode_only
                assert all(
                    bucket.num_tokens <= other.num_tokens
                    for other in buckets
                    if other.num_tokens >= num_tokens and not other.is_decode_only
                ), "padded more than the estimate of its time says"


def test_small_mixed_buckets_are_few_and_leave_room_for_a_chunk_beside_each_bucket_of_decodes():
    buckets = declare_buckets(512, 32, 4, with_small_mixed=True)
    assert set(buckets) - set(declare_buckets(512, 32, 4)) == {Bucket(24, 23), Bucket(48, 32), Bucket(96, 32)}
    buckets = declare_buckets(8192, 256, 8, with_small_mixed=True)
    small = set(buckets) - set(declare_buckets(8192, 256, 8))
    assert small == {Bucket(24, 23), Bucket(48, 47), Bucket(96, 95), Bucket(192, 191), Bucket(384, 256)}
    for num_decodes in (16, 32, 64, 128, 256):
        bucket = pick(buckets, num_decodes + 3, num_decodes, decode_only=False)
        assert bucket.num_tokens == 1.5 * num_decodes


def test_decodes_take_a_bucket_of_their_own_where_a_small_mixed_one_has_fewer_tokens():
    buckets = declare_buckets(512, 32, 4, with_small_mixed=True)
    assert pick(buckets, 20, 20, decode_only=True) == Bucket(32, 32)
    assert pick([Bucket(24, 23), Bucket(512, 32)], 20, 20, decode_only=True) == Bucket(24, 23)
    assert pick(buckets, 24, 23, decode_only=False) == Bucket(24, 23)


def test_pick_takes_the_cheapest_that_is_ready():
    buckets = declare_buckets(512, 32, 4)
    assert pick(buckets, 3, 3, decode_only=True) == Bucket(4, 4)
    assert pick(buckets, 5, 5, decode_only=True) == Bucket(8, 8)
    assert pick(buckets, 5, 1, decode_only=False) == Bucket(128, 32)
    assert pick(buckets[-1:], 3, 3, decode_only=True) == Bucket(512, 32)
    with pytest.raises(ValueError, match="no bucket fits a step of 513 tokens in 1 rows"):
        pick(buckets, 513, 1, decode_only=False)


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
        assert pick(order[:3], num_decodes + 4, num_decodes + 1, decode_only=False).num_tokens == 48


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
