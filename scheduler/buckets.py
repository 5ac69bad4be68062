"""The padded sizes of a step: the few shapes for which a program exists."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIXED_FACTOR = 4  # between mixed sizes: the reading of the weights hides some padding, programs cost start-up time
_MIN_MIXED_TOKENS = 64
_MIN_SMALL_MIXED_TOKENS = 24


@dataclass(frozen=True, order=True, slots=True, kw_only=True)
class Bucket:
    """The size of a padded step, and what its program may count on. The smaller, the cheaper.

    max_q_len: no row has more tokens in the step. Where it is 1, row s has token s, and T = S.
    num_tokens: T.
    num_seqs: S, the rows.
    """

    max_q_len: int
    num_tokens: int
    num_seqs: int

    @classmethod
    def decodes(cls, num_seqs: int) -> "Bucket":
        """For so many rows of one token."""
        return cls(max_q_len=1, num_tokens=num_seqs, num_seqs=num_seqs)

    @classmethod
    def mixed(cls, num_tokens: int, num_seqs: int) -> "Bucket":
        """For rows of any length."""
        return cls(max_q_len=num_tokens, num_tokens=num_tokens, num_seqs=num_seqs)

    @property
    def is_decode_only(self) -> bool:
        """Whether each row has one token."""
        return self.max_q_len == 1

    def fits(self, num_tokens: int, num_seqs: int, max_q_len: int) -> bool:
        return num_tokens <= self.num_tokens and num_seqs <= self.num_seqs and max_q_len <= self.max_q_len


def declare_buckets(
    max_num_batched_tokens: int, max_num_seqs: int, min_tokens: int, *, with_small_mixed: bool = False
) -> tuple[Bucket, ...]:
    """All buckets that steps within these bounds need, the cheapest first; the last one fits any step.

    Decode-only buckets double from `min_tokens` up to `max_num_seqs`. Mixed buckets have `max_num_seqs` rows; they
    shrink by a factor of 4 from `max_num_batched_tokens`, down to about twice `max_num_seqs` (at least 64). No
    bucket has fewer than `min_tokens` tokens: a matrix product of one row is slow on some devices.

    with_small_mixed: for small chunks beside decodes, mixed buckets that double from 24 tokens up to the smallest of
        the others: each is half as large again as a bucket of decodes.
    """
    decode_sizes, size = [], min_tokens
    while size < max_num_seqs:
        decode_sizes.append(size)
        size *= 2
    decode_sizes.append(max(max_num_seqs, min_tokens))

    mixed_sizes = [max(max_num_batched_tokens, min_tokens, 2)]  # a step of one token is no mixed one
    while (size := mixed_sizes[0] // _MIXED_FACTOR) >= max(2 * max_num_seqs, _MIN_MIXED_TOKENS):
        mixed_sizes.insert(0, size)
    small_sizes, size = [], max(_MIN_SMALL_MIXED_TOKENS, min_tokens)
    while with_small_mixed and size < mixed_sizes[0]:
        small_sizes.append(size)
        size *= 2
    return (
        *(Bucket.decodes(size) for size in decode_sizes),
        *(Bucket.mixed(size, min(max_num_seqs, size)) for size in (*small_sizes, *mixed_sizes)),
    )


def mixed_sizes(buckets: Iterable[Bucket]) -> tuple[int, ...]:
    """The padded numbers of tokens of steps with rows of any length."""
    return tuple(bucket.num_tokens for bucket in buckets if not bucket.is_decode_only)


def compile_order(buckets: Sequence[Bucket], *, for_short_steps: bool) -> tuple[Bucket, ...]:
    """In which order the programs of all buckets are made, while those that there are serve.

    The largest, which fits any step, and the largest for decodes, which most steps are. Then the others for decodes and
    the other mixed ones, the larger first.

    for_short_steps: chunks beside decodes are to be small. After the first two comes the smallest mixed bucket in which
        there is room beside any number of decodes, and then those that are smaller.
    """
    decodes, mixed = (
        sorted((bucket for bucket in buckets if bucket.is_decode_only == is_decode_only), reverse=True)
        for is_decode_only in (True, False)
    )
    small = []
    if for_short_steps:
        smallest = min((bucket for bucket in mixed if bucket.num_tokens > mixed[0].num_seqs), default=mixed[0])
        small = [bucket for bucket in mixed if bucket <= smallest]
    return tuple(dict.fromkeys([mixed[0], decodes[0], *small, *decodes, *mixed]))


def pick_bucket(buckets: Iterable[Bucket], num_tokens: int, num_seqs: int, max_q_len: int) -> Bucket:
    """The cheapest of `buckets` that a step of this size fits in. Raises ValueError if none does."""
    fitting = [bucket for bucket in buckets if bucket.fits(num_tokens, num_seqs, max_q_len)]
    if not fitting:
        raise ValueError(f"no bucket fits a step of {num_tokens:,} tokens in {num_seqs:,} rows")
    return min(fitting)
