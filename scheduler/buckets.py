"""The padded sizes of a step: the few shapes for which a program exists."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIXED_FACTOR = 4  # between mixed sizes: the reading of the weights hides some padding, programs cost start-up time
_MIN_MIXED_TOKENS = 64
_MIN_SMALL_MIXED_TOKENS = 24


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
        return num_tokens <= self.num_tokens and num_seqs <= self.num_seqs and (decode_only or not self.is_decode_only)


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

    largest = max(max_num_batched_tokens, 2 * min_tokens)
    if largest == max_num_seqs:
        largest *= 2  # T = S would say that each row has one token
    mixed_sizes = [largest]
    while (size := mixed_sizes[0] // _MIXED_FACTOR) >= max(2 * max_num_seqs, _MIN_MIXED_TOKENS):
        mixed_sizes.insert(0, size)
    small_sizes, size = [], max(_MIN_SMALL_MIXED_TOKENS, min_tokens)
    while with_small_mixed and size < mixed_sizes[0]:
        small_sizes.append(size)
        size *= 2
    return tuple(
        sorted(
            # A mixed step has a row of several tokens, so fewer rows than tokens.
            [Bucket(size, size) for size in decode_sizes]
            + [Bucket(size, min(max_num_seqs, size - 1)) for size in (*small_sizes, *mixed_sizes)]
        )
    )


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
        smallest = min(bucket for bucket in mixed if bucket.num_seqs == mixed[0].num_seqs)
        small = [bucket for bucket in mixed if bucket <= smallest]
    return tuple(dict.fromkeys([mixed[0], decodes[0], *small, *decodes, *mixed]))


def pick(buckets: Iterable[Bucket], num_tokens: int, num_seqs: int, decode_only: bool) -> Bucket:
    """The cheapest of `buckets` that a step fits in.

    `decode_only`: each row of the step has one token. Such a step takes a bucket of its kind if one fits. Raises
    ValueError if none fits.
    """
    fitting = [bucket for bucket in buckets if bucket.fits(num_tokens, num_seqs, decode_only)]
    if not fitting:
        raise ValueError(f"no bucket fits a step of {num_tokens:,} tokens in {num_seqs:,} rows")
    return min(fitting, key=lambda bucket: (bucket.is_decode_only != decode_only, bucket))
