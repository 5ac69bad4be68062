"""How many pages a group of layers keeps of a sequence: all of them, or those of a sliding window.

A token of a group with a window sees itself and the `window - 1` tokens before it; without one (None), all before it.
"""

from collections.abc import Sequence

import numpy as np


def num_left_pages[I: (int, np.ndarray)](num_computed_tokens: I, window: int, page_size: int) -> I:
    """How many of a sequence's first pages the tokens after `num_computed_tokens` do not see; below 0 stands for 0."""
    return (num_computed_tokens - (window - 1)) // page_size


def num_window_pages(window: int, max_chunk_tokens: int, page_size: int) -> int:
    """The most pages in which the tokens of a step and all that they see can lie."""
    num_tokens = window - 1 + max_chunk_tokens
    return 1 + (num_tokens + page_size - 2) // page_size  # the first token may be the last of its page


def num_request_pages(
    num_tokens: int,
    windows: Sequence[int | None],
    max_chunk_tokens: int,
    page_size: int,
    num_shared_pages: int = 0,
) -> int:
    """The most pages that a request of `num_tokens` tokens holds at once, over all groups, if no step computes more
    than `max_chunk_tokens` of them. Those that it shares in each group are not counted."""
    num_spanned = -(-num_tokens // page_size) - num_shared_pages
    return sum(
        num_spanned if window is None else min(num_spanned, num_window_pages(window, max_chunk_tokens, page_size))
        for window in windows
    )
