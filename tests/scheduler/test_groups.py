"""Groups of layers with windows keep what the next token sees, give back the rest, and change no token.

The device of `conftest` fails the test if a token reads a page that was given back, and what it reads wrongly within a
window changes every token after it.
"""

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestRefusedError, RequestStatus, SchedulerConfigError
from jaxllm.scheduler.prefix_cache import PrefixCache
from jaxllm.scheduler.windows import num_left_pages, num_request_pages, num_window_pages

PROMPT = [index * 7 % 61 for index in range(42)]  # ten pages of 4 tokens, and two more
WINDOWS = [(None, 9), (9, None, 9), (1, None, 14), (6,), (4, 4)]


def used_pages(loop):
    return loop.scheduler.stats().num_used_pages


def hit_tokens(loop):
    return loop.scheduler.stats().num_prefix_hit_tokens


def held_pages(loop, request, group):
    """The page numbers, in its sequence, of the pages that a request has in a group."""
    return np.flatnonzero(loop.scheduler.table.page_table[group, request.row]).tolist()


def check_alone(loop, expect_alone, *requests):
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)


# What is kept


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_page_is_left_when_the_next_token_does_not_see_its_last_one(window, page_size):
    for num_computed in range(60):
        first_seen = max(0, num_computed - window + 1)
        expected = first_seen // page_size
        assert max(0, num_left_pages(num_computed, window, page_size)) == expected


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("max_chunk_tokens", [1, 5, 8])
def test_the_pages_of_a_window_and_a_chunk_are_as_many_as_it_may_come_to(window, page_size, max_chunk_tokens):
    held = []
    for num_computed in range(100):
        last = (num_computed + max_chunk_tokens - 1) // page_size
        held.append(1 + last - max(0, num_left_pages(num_computed, window, page_size)))
    assert max(held) == num_window_pages(window, max_chunk_tokens, page_size)


def test_a_request_holds_all_pages_of_full_groups_and_those_of_the_window_of_others():
    assert num_request_pages(1000, (None,), 8, 10) == 100
    assert num_request_pages(1000, (None, 20, 20), 8, 10) == 100 + 2 * 4
    assert num_request_pages(15, (None, 20, 20), 8, 10) == 3 * 2
    assert num_request_pages(1000, (None, 20), 8, 10, num_shared_pages=99) == 2


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
@pytest.mark.parametrize("windows", WINDOWS)
def test_tokens_are_those_of_a_request_alone(make_loop, expect_alone, windows, num_ahead):
    loop = make_loop(num_ahead, windows=windows, max_num_batched_tokens=16)
    requests = [Request(f"r{index}", PROMPT[index : 3 + index * 5], max_tokens=40) for index in range(8)]
    loop.add(*requests)
    loop.run()
    check_alone(loop, expect_alone, *requests)
    assert loop.scheduler.stats().num_left_pages > 0


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_pages_that_left_the_window_are_free_before_the_next_step(make_loop, num_ahead):
    loop = make_loop(num_ahead, windows=(None, 9), max_num_batched_tokens=16, enable_prefix_caching=False)
    request = Request("a", PROMPT, max_tokens=40)
    loop.add(request)
    while not request.status.is_finished:
        before = 0 if request.row is None else int(loop.scheduler.table.num_computed_tokens[request.row])
        plan = loop.schedule()
        if plan is not None:
            first, end = max(0, before - 8) // 4, -(-(before + plan.num_tokens) // 4)
            assert held_pages(loop, request, 0) == list(range(end))
            assert held_pages(loop, request, 1) == list(range(first, end))
            assert used_pages(loop) == end + end - first
        if plan is None or len(loop.in_flight) > num_ahead:
            loop.update()
    loop.run()


def test_a_long_text_needs_no_more_pages_than_its_window(make_loop, expect_alone):
    most = num_window_pages(9, 8, 4)
    loop = make_loop(windows=(9, 9), max_num_batched_tokens=8, num_pages=1 + 2 * most)
    request = Request("a", PROMPT, max_tokens=80)  # 31 pages in each group
    loop.add(request)
    loop.run()
    check_alone(loop, expect_alone, request)
    assert most == 5


# The prefix cache


@pytest.mark.parametrize("num_ahead", [0, 2])
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_prompt_seen_before_is_not_computed_again(make_loop, expect_alone, windows, num_ahead):
    loop = make_loop(num_ahead, windows=windows, max_num_batched_tokens=16)
    first, second = (Request(name, PROMPT, max_tokens=12) for name in ("first", "second"))
    for request in (first, second):
        loop.add(request)
        loop.run()
    assert hit_tokens(loop) == 40
    check_alone(loop, expect_alone, first, second)
    turn = Request("next turn", [*PROMPT, *first.output_token_ids, 1, 2, 3], max_tokens=5)
    loop.add(turn)
    loop.run()
    # 53 of the 54 tokens were computed. With a host ahead, a window of 1 leaves pages before their tokens are known.
    assert hit_tokens(loop) - 40 == 52 or (1 in windows and num_ahead)
    check_alone(loop, expect_alone, turn)


def test_a_hit_begins_with_the_pages_of_the_window_only(make_loop, expect_alone):
    loop = make_loop(windows=(None, 9))
    for name in ("first", "second"):
        request = Request(name, PROMPT, max_tokens=3)
        loop.add(request)
        loop.schedule()
        if name == "second":
            assert held_pages(loop, request, 0) == list(range(11))
            assert held_pages(loop, request, 1) == [8, 9, 10]  # of 40 shared tokens the next sees the last 8
            loop.scheduler.check_integrity()
        loop.run()
    check_alone(loop, expect_alone, request)


def test_the_longest_prefix_is_found_of_which_each_group_has_what_the_next_token_sees(make_config):
    """Against a search that tries every length."""
    rng = np.random.default_rng(0)
    lengths = set()
    for windows in [(None,), (None, 9), (5, None, 17), (9, 5), (1,), (None, None)]:
        for _ in range(200):
            cache = PrefixCache(4, windows=windows)
            request = Request("a", rng.integers(0, 61, rng.integers(1, 60)).tolist(), max_tokens=1)
            keys = cache.keys(request)
            known = [[bool(rng.random() < 0.8) for _ in keys] for _ in windows]
            for group, is_known in enumerate(known):
                pages = [1 + len(windows) * index + group if is_in else 0 for index, is_in in enumerate(is_known)]
                cache.register(keys, pages, group)
            expected: list[int] = []
            for number in range((request.num_tokens - 1) // 4 + 1):
                firsts = [0 if window is None else max(0, 4 * number - window + 1) // 4 for window in windows]
                if all(all(is_known[first:number]) for first, is_known in zip(firsts, known, strict=True)):
                    expected = [
                        1 + len(windows) * index + group if index >= first else 0
                        for index in range(number)
                        for group, first in enumerate(firsts)
                    ]
            assert cache.match(request) == expected
            lengths.add((windows, len(expected)))
            cache.check_integrity()
    assert len(lengths) > 40


def test_a_window_whose_pages_were_evicted_is_computed_again(make_loop, expect_alone):
    loop = make_loop(windows=(None, 9), num_pages=60)
    first, second = (Request(name, PROMPT, max_tokens=1) for name in ("first", "second"))
    loop.add(first)
    loop.run()
    cache = loop.scheduler._pages.cache
    pages = [cache._page_of[key + cache._tags[1]] for key in cache.keys(first)]
    loop.scheduler._pages.pool.forget_cached(pages[6:7])  # of ten; prefixes of up to 6 or from 9 do not need it
    loop.add(second)
    loop.run()
    assert hit_tokens(loop) == 40
    loop.scheduler._pages.pool.forget_cached(pages[9:10])
    third = Request("third", PROMPT, max_tokens=1)
    loop.add(third)
    loop.run()
    assert hit_tokens(loop) == 40 + 36
    check_alone(loop, expect_alone, second, third)


def test_pages_are_given_up_from_the_ends_of_all_groups_first(make_loop):
    loop = make_loop(windows=(None, 100), num_pages=65)
    loop.add(Request("a", PROMPT[:17], max_tokens=1))
    loop.run()
    pages = loop.scheduler._pages
    cached = list(pages.pool._cached)
    keys = [pages.cache._key_of[page][:32] for page in cached]
    assert keys == [key for key in reversed(list(dict.fromkeys(reversed(keys)))) for _ in range(2)]
    assert len(keys) == 8


@pytest.mark.parametrize("windows", WINDOWS)
def test_identical_prompts_that_arrive_together_share(make_loop, expect_alone, windows):
    loop = make_loop(1, windows=windows, max_num_batched_tokens=16)
    requests = [Request(f"r{index}", PROMPT, max_tokens=6) for index in range(5)]
    loop.add(*requests)
    loop.run()
    assert hit_tokens(loop) == 4 * 40
    check_alone(loop, expect_alone, *requests)


# Pressure


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("windows", [(None, 9), (9, None, 9), (1, None, 14), (40, 40)])
def test_a_preempted_request_gives_the_same_tokens(make_loop, expect_alone, windows, num_ahead):
    num_pages = 1 + num_request_pages(60, windows, 16, 4) + 6
    loop = make_loop(num_ahead, windows=windows, num_pages=num_pages, max_model_len=60, max_num_batched_tokens=16)
    requests = [Request(f"r{index}", PROMPT[index:20], max_tokens=40) for index in range(6)]
    loop.add(*requests)
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    check_alone(loop, expect_alone, *requests)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 20])
def test_an_abort_frees_the_pages_of_all_groups(make_loop, num_steps):
    loop = make_loop(1, windows=(None, 9, 9), max_num_batched_tokens=16)
    loop.add(Request("a", PROMPT, max_tokens=40))
    for _ in range(num_steps):
        loop.step()
    assert used_pages(loop) > 0
    loop.scheduler.abort_request("a")
    loop.scheduler.check_integrity()
    assert used_pages(loop) == 0
    loop.run()


def test_a_request_that_fits_only_by_its_windows_is_served_and_a_longer_one_refused(make_loop, expect_alone):
    sizes = {"max_num_batched_tokens": 8, "max_model_len": 128, "windows": (None, 9, 9)}
    loop = make_loop(**sizes, num_pages=1 + 30 + 5 + 5)
    request = Request("fits", PROMPT, max_tokens=120 - 42)
    loop.add(request)
    loop.run()
    check_alone(loop, expect_alone, request)
    with pytest.raises(RequestRefusedError) as refusal:
        loop.add(Request("too long", PROMPT, max_tokens=121 - 42))
    assert str(refusal.value) == (
        "request 'too long': 42 prompt tokens and max_tokens 79, within max_model_len 128, make 121 tokens; they need "
        "41 pages of 4 tokens over 3 groups of layers (1 that attend to all, 2 that attend to 9 tokens, of steps of at "
        "most 8 tokens), and the KV cache has 40. Lower max_tokens or give the KV cache more pages."
    )


def test_admission_counts_the_pages_of_all_groups(make_loop):
    """The second request needs 2 pages in each of 3 groups, and the first one's next page is kept in each."""
    for num_pages, starts in ((1 + 3 * 6 + 6 + 3 - 1, False), (1 + 3 * 6 + 6 + 3, True)):
        loop = make_loop(windows=(None, 30, 30), num_pages=num_pages, max_model_len=24, enable_prefix_caching=False)
        loop.add(Request("first", PROMPT[:23], max_tokens=1), Request("second", PROMPT[:7], max_tokens=1))
        plan = loop.schedule()
        assert plan.num_seqs == 1 + starts
        loop.run()


def test_admission_counts_shared_pages_that_nobody_owns_and_never_more_than_the_request_may_hold(make_loop):
    loop = make_loop(windows=(None, 9), max_num_batched_tokens=8)
    loop.add(Request("first", PROMPT, max_tokens=1))
    loop.run()
    pages = loop.scheduler._pages
    for num_tokens, expected in ((46, 2 + 2 + 10 + 2), (62, 16 + 5)):
        request = Request("second", [*PROMPT, *range(num_tokens - 42)], max_tokens=1)
        shared_pages = pages.match(request)
        assert pages.num_missing(request, shared_pages) == expected


def test_a_hit_does_not_make_a_request_wait_for_more_pages_than_there_are(make_loop, expect_alone):
    loop = make_loop(windows=(9,), max_num_batched_tokens=8, num_pages=1 + num_window_pages(9, 8, 4))
    first, second = Request("first", PROMPT, max_tokens=1), Request("second", [*PROMPT, *PROMPT], max_tokens=1)
    for request in (first, second):
        loop.add(request)
        loop.run()
    assert hit_tokens(loop) == 40
    check_alone(loop, expect_alone, first, second)


@pytest.mark.parametrize("num_right", [0, 1, 5])
@pytest.mark.parametrize("windows", WINDOWS)
def test_rejected_drafts_find_the_pages_that_the_next_token_sees(make_loop, expect_alone, windows, num_right):
    """A row steps back by the drafts that were wrong, and what it sees then is still there."""
    loop = make_loop(1, windows=windows, max_num_batched_tokens=16)
    request = Request("a", PROMPT[:10], max_tokens=60)
    expected = expect_alone(request, loop.config)
    loop.add(request)
    while loop.scheduler.has_unfinished_requests:
        while loop.in_flight:
            loop.update()
        right = expected[request.num_output_tokens :][:num_right]
        loop.scheduler.propose({"a": [*right, *[60] * (5 - len(right))]})
        loop.step()
        loop.schedule()
    loop.run()
    assert request.output_token_ids == expected
    assert loop.scheduler.stats().all_steps.num_draft_tokens > 30


def test_a_failed_request_leaves_nothing_to_be_found_in_any_group(make_loop):
    loop = make_loop(windows=(None, 9))
    loop.add(Request("a", PROMPT, max_tokens=40))
    for _ in range(4):
        loop.step()
    cache, first = loop.scheduler._pages.cache, loop.scheduler._requests["a"]
    keys = cache.own_keys(cache.keys(first))
    assert sum(cache.page_of(key) is not None for key in keys) > 10
    loop.scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    loop.scheduler.check_integrity()
    assert not any(cache.page_of(key) for key in keys), "a page that left the window can be found"
    loop.add(Request("b", PROMPT, max_tokens=1))
    loop.run()
    assert hit_tokens(loop) == 0


@pytest.mark.parametrize("windows", [(), (0,), (None, -1)])
def test_windows_that_are_none_are_refused(make_config, windows):
    with pytest.raises(
        SchedulerConfigError, match=r"windows is \(.*\); it must have an entry for each group of layers"
    ):
        make_config(windows=windows)
