"""The requests of benchmarks/host.py, for each scheduler in a Python of its own: standard library and numpy only."""

from collections.abc import Iterator
from itertools import count

import numpy as np

Arrival = tuple[list[int], int]
"""Prompt token ids, and the number of output tokens."""

STOP_TOKEN_ID = 2


def decode_load(num_rows: int, max_model_len: int) -> Iterator[Arrival]:
    """As many requests as rows, which outlast the measurement. Lengths differ, so pages fill in turn."""
    rng = np.random.default_rng(0)
    for index in range(num_rows):
        prompt_len = 64 + index % 64
        yield rng.integers(0, 32_000, prompt_len).tolist(), max_model_len - prompt_len


def churn_load(num_rows: int, max_model_len: int) -> Iterator[Arrival]:
    """Requests without end, of 16 to 127 tokens in and out."""
    del num_rows, max_model_len
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, 32_000, rng.integers(16, 128)).tolist(), int(rng.integers(16, 128))


def turnover_load(num_rows: int, max_model_len: int) -> Iterator[Arrival]:
    """Requests without end, of 16 to 127 tokens in and 10 out. The first ones differ, to end in different steps."""
    del max_model_len
    rng = np.random.default_rng(0)
    for index in count():
        yield rng.integers(0, 32_000, rng.integers(16, 128)).tolist(), 10 if index >= num_rows else 1 + index % 10


LOADS = {"decode": decode_load, "churn": churn_load, "turnover": turnover_load}


def num_unfinished(num_rows: int) -> int:
    """Requests that are kept running or waiting, as long as the load has some."""
    return num_rows + num_rows // 8 + 1


def max_num_batched_tokens(num_rows: int) -> int:
    return 2048 + 8 * num_rows


def sampled_token_ids(num_rows: int) -> list[int]:
    """What every step samples: none of it is a stop token."""
    return np.random.default_rng(1).integers(STOP_TOKEN_ID + 1, 32_000, num_rows).tolist()
