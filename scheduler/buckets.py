"""The padded sizes of a step: the few shapes for which a program exists."""

from collections.abc import Iterable
from dataclasses import dataclass

_MAX_FINE_SIZES = 4  # mixed sizes a factor of 2 apart, if this many are enough; else a factor of 4


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """A padded step of `num_tokens` (T) tokens in `num_seqs` (S) rows. The smaller, the cheaper."""

    num_tokens: int
    num_seqs: int

    @property
    def is_decode_only(self) -> bool:
        """Whether the program may count on each row having one token. No mixed bucket has T = S."""
        return self.num_tokens == self.num_seqs

    def fits(self, num_tokens: int, num_seqs: int, decode_only: bool) -> bool:
        return (
            num_tokens <= self.num_tokens
            and num_seqs <= self.num_seqs
            and (decode_only or not self.is_decode_only)
        )


def declare_buckets(max_num_batched_tokens: int, max_num_seqs: int, min_tokens: int) -> tuple[Bucket, ...]:
    """All buckets that steps within these bounds need, the cheapest first; the last one fits any step.

    Decode-only buckets double from `min_tokens` up to `max_num_seqs`. Mixed buckets all have `max_num_seqs`
    rows; they grow by 2, or by 4 where that would be too many programs, from about twice `max_num_seqs` (at
    least 64) up to `max_num_batched_tokens`. No bucket has fewer than `min_tokens` tokens: a matrix product
    of one row is slow on some devices.
    """
    decode_sizes = _sizes(min_tokens, max(max_num_seqs, min_tokens), 2)
    largest = max_num_batched_tokens
    if largest <= decode_sizes[-1]:
        largest = 2 * decode_sizes[-1]  # T = S would say that each row has one token
    smallest = 64
    while smallest < 2 * max_num_seqs:
        smallest *= 2
    mixed_sizes = _sizes(smallest, largest, 2)
    if len(mixed_sizes) > _MAX_FINE_SIZES:
        mixed_sizes = _sizes(smallest, largest, 4)
    return (
        *(Bucket(size, size) for size in decode_sizes),
        *(Bucket(size, max_num_seqs) for size in mixed_sizes),
    )


def pick(buckets: Iterable[Bucket], num_tokens: int, num_seqs: int, decode_only: bool) -> Bucket:
    """The cheapest of `buckets` that a step fits in.

    `decode_only`: each row of the step has one token. Raises ValueError if none fits.
    """
    fitting = [bucket for bucket in buckets if bucket.fits(num_tokens, num_seqs, decode_only)]
    if not fitting:
        raise ValueError(f"no bucket fits a step of {num_tokens:,} tokens in {num_seqs:,} rows")
    return min(fitting)


def _sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """smallest, smallest * factor, … and, in any case, largest."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return [*sizes, largest]
