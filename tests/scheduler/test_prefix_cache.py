"""What begins alike is computed once, and nothing else is ever mistaken for it."""

import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestStatus
from jaxllm.scheduler.prefix_cache import PrefixCache

PROMPT = [index * 7 % 61 for index in range(22)]  # five pages of 4 tokens, and two more


def hit_tokens(loop):
    return loop.scheduler.stats().num_prefix_hit_tokens


def salted(salt):
    return {"options": RequestOptions(cache_salt=salt)}


def run(loop, *requests):
    """Runs them one after the other. Returns what each found."""
    found = []
    for request in requests:
        before = hit_tokens(loop)
        loop.add(request)
        loop.run()
        found.append(hit_tokens(loop) - before)
    return found


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_a_prompt_seen_before_is_not_computed_again(make_loop, expect_alone, num_ahead):
    loop = make_loop(num_ahead)
    requests = [Request(name, PROMPT, max_tokens=12) for name in ("first", "second")]
    assert run(loop, *requests) == [0, 20]
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)
    assert sum(plan.num_tokens for plan in loop.plans) == (22 + 11) + (2 + 11)


def test_a_hit_never_covers_the_whole_prompt(make_loop, expect_alone):
    loop = make_loop()
    requests = [Request(name, PROMPT[:20], max_tokens=3) for name in ("first", "second")]
    assert run(loop, *requests) == [0, 16]
    assert requests[0].output_token_ids == requests[1].output_token_ids == expect_alone(requests[1], loop.config)


def test_the_next_turn_finds_the_tokens_that_were_generated(make_loop, expect_alone):
    loop = make_loop(1)
    first = Request("first turn", PROMPT, max_tokens=20)
    run(loop, first)
    history = [*PROMPT, *first.output_token_ids, 1, 2, 3]
    second = Request("second turn", history, max_tokens=5)
    # The last token of the first turn was sampled but never computed: 41 of its 42 tokens make 10 pages.
    assert run(loop, second) == [40]
    assert second.output_token_ids == expect_alone(second, loop.config)


def test_identical_prompts_that_arrive_together_share(make_loop, expect_alone):
    """The device fails the test if a page is read in the step that writes it."""
    loop = make_loop(1, max_num_batched_tokens=16)
    requests = [Request(f"r{index}", PROMPT, max_tokens=6) for index in range(5)]
    loop.add(*requests)
    loop.run()
    assert hit_tokens(loop) == 4 * 20
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)
    assert sum(plan.num_tokens for plan in loop.plans) == 22 + 4 * 2 + 5 * 5


def test_who_waits_for_pages_of_another_is_passed_and_not_forgotten(make_loop):
    loop = make_loop(max_num_batched_tokens=8)
    first, alike = (Request(name, PROMPT, max_tokens=2) for name in ("first", "alike"))
    other = Request("other", [9] * 6, max_tokens=9)
    loop.add(first, alike, other)
    while first.row is not None or first.status is RequestStatus.WAITING:
        loop.step()
        assert first.status.is_finished or alike.row is None or hit_tokens(loop) == 20
    loop.run()
    assert hit_tokens(loop) == 20


def test_the_one_that_computes_for_others_may_leave(make_loop, expect_alone):
    loop = make_loop(1, max_num_batched_tokens=8)
    first, alike = (Request(name, PROMPT, max_tokens=4) for name in ("first", "alike"))
    loop.add(first, alike)
    loop.step()
    loop.step()
    loop.scheduler.abort_request("first")
    loop.run()
    assert 0 < hit_tokens(loop) < 20
    assert alike.output_token_ids == expect_alone(alike, loop.config)


def test_salt_and_adapter_isolate(make_loop):
    loop = make_loop()
    kinds = [{}, salted("a"), {"adapter_id": "a"}, salted("a") | {"adapter_id": "a"}, salted("b")]
    assert run(loop, *(Request(f"1{i}", PROMPT, max_tokens=1, **kind) for i, kind in enumerate(kinds))) == [0] * 5
    assert run(loop, *(Request(f"2{i}", PROMPT, max_tokens=1, **kind) for i, kind in enumerate(kinds))) == [20] * 5


def test_keys_depend_on_all_that_pages_depend_on():
    cache = PrefixCache(page_size=4)

    def keys(prompt, **kind):
        return cache.keys(Request("a", prompt, max_tokens=1, **kind))

    base = keys(PROMPT)
    assert len(base) == len(set(base)) == 5
    assert keys(PROMPT[:20]) == base
    assert keys(PROMPT[:19]) == base[:4]
    changed = keys([PROMPT[0] + 1, *PROMPT[1:]])
    assert not set(changed) & set(base), "pages after a different page are different"
    assert keys([1, 2, 3, 4] * 5)[0] != keys([1, 2, 3, 4] * 5)[1], "the same tokens at another place"
    ambiguous = [salted("c") | {"adapter_id": "ab"}, salted("bc") | {"adapter_id": "a"}]
    assert keys(PROMPT, **ambiguous[0]) != keys(PROMPT, **ambiguous[1])


def test_a_request_may_stay_out_of_the_cache(make_loop):
    loop = make_loop()
    out = {"max_tokens": 1, "use_prefix_cache": False}
    requests = [Request("out", PROMPT, **out), Request("in", PROMPT, max_tokens=1), Request("out again", PROMPT, **out)]
    assert run(loop, *requests) == [0, 0, 0]
    assert run(loop, Request("in again", PROMPT, max_tokens=1)) == [20]
    assert loop.scheduler.stats().num_prefix_query_tokens == 2 * 22


def test_without_prefix_caching_nothing_is_found_or_kept(make_loop):
    loop = make_loop(enable_prefix_caching=False)
    assert run(loop, *(Request(name, PROMPT, max_tokens=1) for name in "ab")) == [0, 0]
    stats = loop.scheduler.stats()
    assert stats.num_cached_pages == stats.num_prefix_query_tokens == 0


def test_a_preempted_request_finds_its_own_pages(make_loop, expect_alone):
    recomputed = {}
    for is_enabled in (True, False):
        loop = make_loop(1, num_pages=17, max_model_len=60, enable_prefix_caching=is_enabled)
        requests = [Request(f"r{index}", [index] * 10, max_tokens=35) for index in range(2)]
        loop.add(*requests)
        loop.run()
        stats = loop.scheduler.stats()
        assert stats.num_preemptions > 0
        recomputed[is_enabled] = stats.num_recomputed_tokens
        for request in requests:
            assert request.output_token_ids == expect_alone(request, loop.config)
    assert recomputed[True] < recomputed[False]


def test_a_reset_is_refused_while_requests_run_and_forced_keeps_their_order(make_loop, expect_alone):
    loop = make_loop(1)
    requests = [Request(f"r{index}", [index] * 9, max_tokens=20) for index in range(4)]
    loop.add(*requests)
    for _ in range(3):
        loop.step()
    assert loop.scheduler.reset_prefix_cache() is False
    assert all(request.row is not None for request in requests)
    assert loop.scheduler.reset_prefix_cache(force=True) is True
    loop.scheduler.check_integrity()
    assert {request.status for request in requests} == {RequestStatus.PREEMPTED}
    assert loop.scheduler.stats().num_cached_pages == 0
    before = hit_tokens(loop)
    started = []
    while len(started) < 4:
        loop.step()
        started += loop.plans[-1].started
    assert started == requests
    loop.run()
    assert hit_tokens(loop) == before
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)
    assert loop.scheduler.reset_prefix_cache() is True


def test_pages_of_a_failed_step_are_not_found(make_loop):
    loop = make_loop(1)
    loop.add(Request("a", PROMPT, max_tokens=9))
    loop.step()
    loop.schedule()
    loop.in_flight.clear()
    loop.scheduler.finish_request("a", RequestStatus.FINISHED_ERROR)
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().num_cached_pages == 0
    assert run(loop, Request("b", PROMPT, max_tokens=2)) == [0]


def test_statistics_count_each_admission_once(make_loop):
    """Not each look at a request that waits for a row."""
    loop = make_loop(max_num_seqs=1)
    loop.add(*(Request(f"r{index}", PROMPT, max_tokens=4) for index in range(3)))
    loop.run()
    stats = loop.scheduler.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (3 * 22, 2 * 20)


def test_the_longest_match_goes_first_among_equals_and_overtakes_nobody_for_ever(make_loop):
    loop = make_loop(max_num_seqs=1, prefix_window=3)
    run(loop, Request("seen", PROMPT, max_tokens=1))
    loop.add(Request("new", [5] * 22, max_tokens=1), *(Request(f"hit{i}", PROMPT, max_tokens=1) for i in range(5)))
    loop.add(Request("urgent", [6] * 22, max_tokens=1, options=RequestOptions(priority=-1)))
    loop.run()
    assert list(loop.streams) == ["seen", "urgent", "hit0", "hit1", "hit2", "new", "hit3", "hit4"]


def test_a_salt_may_be_any_string(make_loop):
    """Also one that is not Unicode text, as JSON may hold."""
    loop = make_loop()
    salts = [salted("\ud800"), salted("\ud800"), salted("?"), {"adapter_id": "\ud800"}]
    assert run(loop, *(Request("a", PROMPT, max_tokens=1, **salt) for salt in salts)) == [0, 20, 0, 0]


def test_one_that_comes_back_in_front_does_not_let_others_be_overtaken_more(make_loop):
    """As after a preemption: it has been overtaken by nobody, but those behind it have."""
    loop = make_loop(max_num_seqs=1, prefix_window=3)
    run(loop, Request("seen", PROMPT, max_tokens=1))
    hits = [Request(f"hit{index}", PROMPT, max_tokens=1, arrival_time=2.0) for index in range(5)]
    loop.add(Request("new", [5] * 22, max_tokens=1, arrival_time=1.0), *hits)
    while "hit2" not in loop.streams:
        loop.step()
    loop.add(Request("front", [6] * 22, max_tokens=1, arrival_time=0.0))
    loop.run()
    assert list(loop.streams).index("new") < list(loop.streams).index("hit3")
