"""The last minute: latencies and rates for the live view."""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np

NUM_SECONDS = 60
PERCENTILES = (50, 90, 99)
_BOUNDS = tuple(np.geomspace(1e-4, 1e3, 161).tolist())  # seconds; each bucket is 11% wide
_NUM_SLOTS = NUM_SECONDS + 4  # of a second each; the margin keeps those that are read from being written anew
_KINDS = ("ttft", "itl", "tpot")
_BUCKET_LEN = len(_BOUNDS) + 1
_EPOCH, _NUM_TOKENS, _BUCKETS = 0, 1, 2
_SLOT_SIZE = _BUCKETS + len(_KINDS) * _BUCKET_LEN
_STARTS = {kind: _BUCKETS + number * _BUCKET_LEN for number, kind in enumerate(_KINDS)}
_ITL_START = _STARTS["itl"]


class Recent:
    """Histograms of latencies and a count of tokens for each of the last seconds, in a ring of slots.

    They live in a vector that is given (`SIZE` numbers), so that several processes can be read together. Times are
    of `time.monotonic`, which processes of one machine have in common.
    """

    SIZE = _NUM_SLOTS * _SLOT_SIZE

    def __init__(self, vector: "memoryview[float]") -> None:
        self._vector = vector
        self._empty = memoryview(bytearray(8 * _SLOT_SIZE)).cast("d")

    def add(self, now: float, kind: str, seconds: float) -> None:
        """Takes in a latency. kind: "ttft", "itl" or "tpot"."""
        self._vector[self._slot(now) + _STARTS[kind] + bisect_left(_BOUNDS, seconds)] += 1

    def add_tokens(self, now: float, num_tokens: int, itl_s: float | None) -> None:
        """Takes in tokens, each so long after the one before it, if there was one."""
        slot = self._slot(now)
        self._vector[slot + _NUM_TOKENS] += num_tokens
        if itl_s is not None:
            self._vector[slot + _ITL_START + bisect_left(_BOUNDS, itl_s)] += num_tokens

    def _slot(self, now: float) -> int:
        """Where the slot of this second begins; it is emptied if it still holds another one."""
        epoch = int(now)
        start = epoch % _NUM_SLOTS * _SLOT_SIZE
        if self._vector[start + _EPOCH] != epoch:
            self._vector[start : start + _SLOT_SIZE] = self._empty
            self._vector[start + _EPOCH] = epoch
        return start


def summarize(vectors: np.ndarray, now: float) -> Mapping[str, object]:
    """What the vectors, float64[num_workers, SIZE], say of the last minute, as JSON has it.

    tokens_per_s: over the last five whole seconds. <kind>_ms: percentiles as "p50" and so on, and "count";
    percentiles are None where nothing was measured. They are interpolated in buckets that are 11% wide.
    """
    slots = vectors.reshape(-1, _SLOT_SIZE)
    ages = int(now) - slots[:, _EPOCH]
    num_tokens = slots[(ages >= 1) & (ages <= 5), _NUM_TOKENS].sum()
    buckets = slots[(ages >= 0) & (ages < NUM_SECONDS), _BUCKETS:].sum(axis=0).reshape(len(_KINDS), _BUCKET_LEN)
    return {
        "tokens_per_s": float(num_tokens) / 5,
        **{f"{kind}_ms": _percentiles(counts) for kind, counts in zip(_KINDS, buckets, strict=True)},
    }


def _percentiles(counts: np.ndarray) -> dict[str, float | int | None]:
    count = int(counts.sum())
    if not count:
        return {"count": 0, **{f"p{percent}": None for percent in PERCENTILES}}
    ends = (*_BOUNDS, _BOUNDS[-1])  # what is above the last bound counts as being at it
    cumulative = np.cumsum(counts)
    result: dict[str, float | int | None] = {"count": count}
    for percent in PERCENTILES:
        rank = count * percent / 100
        bucket = int(np.searchsorted(cumulative, rank))
        low, high = (ends[bucket - 1] if bucket else 0.0), ends[bucket]
        part = (rank - (cumulative[bucket] - counts[bucket])) / counts[bucket]
        result[f"p{percent}"] = round(1e3 * (low + (high - low) * float(part)), 3)
    return result
