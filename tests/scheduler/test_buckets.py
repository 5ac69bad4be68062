"""Few buckets, and each step fits one of them."""

import pytest

from jaxllm.scheduler import Bucket, declare_buckets, pick


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


@pytest.mark.parametrize("min_tokens", [1, 4])
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_num_seqs"),
    [(1, 1), (4, 4), (8, 8), (9, 8), (20, 16), (64, 1), (500, 3), (512, 100), (64, 64), (2048, 256)],
)
def test_every_step_within_the_bounds_fits(max_num_batched_tokens, max_num_seqs, min_tokens):
    buckets = declare_buckets(max_num_batched_tokens, max_num_seqs, min_tokens)
    assert len(buckets) <= 12
    assert list(buckets) == sorted(set(buckets))
    assert min(bucket.num_tokens for bucket in buckets) >= min_tokens
    for num_seqs in {1, 2, max_num_seqs // 2 + 1, max_num_seqs}:
        if num_seqs <= max_num_seqs:
            bucket = pick(buckets, num_seqs, num_seqs, decode_only=True)
            assert bucket.num_tokens == bucket.num_seqs >= num_seqs
            bucket = pick(buckets, max_num_batched_tokens, num_seqs, decode_only=False)
            assert not bucket.is_decode_only
            assert pick(buckets[-1:], num_seqs, num_seqs, decode_only=True) == buckets[-1]


def test_pick_takes_the_cheapest_that_is_ready():
    buckets = declare_buckets(512, 32, 4)
    assert pick(buckets, 3, 3, decode_only=True) == Bucket(4, 4)
    assert pick(buckets, 5, 5, decode_only=True) == Bucket(8, 8)
    assert pick(buckets, 5, 1, decode_only=False) == Bucket(128, 32)
    assert pick(buckets[-1:], 3, 3, decode_only=True) == Bucket(512, 32)
    with pytest.raises(ValueError, match="no bucket fits a step of 513 tokens in 1 rows"):
        pick(buckets, 513, 1, decode_only=False)
