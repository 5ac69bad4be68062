"""What the device has no room for waits on the host, and comes back in time or not at all."""

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestStatus, SchedulerConfig, SchedulerConfigError

PROMPT = [index * 7 % 61 for index in range(22)]  # five pages of 4 tokens, and two more
LONG = [index * 11 % 61 for index in range(80)]  # its 20 pages and those of its output leave room for nothing else
LOADING = RequestStatus.WAITING_FOR_PAGES


@pytest.fixture
def make_tiered(make_loop):
    """A loop with 24 pages on the device and many on the host."""

    def make(num_ahead=0, **changes):
        sizes = {"num_pages": 25, "max_model_len": 96, "num_host_pages": 100, "kv_return_by": "copy"}
        return make_loop(num_ahead, **(sizes | changes))

    return make


def run(loop, request):
    loop.add(request)
    loop.run()


def evict(loop):
    """Makes the device forget all but what the host keeps."""
    run(loop, Request("long", LONG, max_tokens=15))
    loop.plans.clear()


def until(loop, request, status):
    while request.status is not status:
        assert not request.status.is_finished
        loop.schedule()
        if request.status is not status and loop.in_flight:
            loop.update()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_what_was_evicted_comes_back_by_copy(make_tiered, expect_alone, num_ahead):
    loop = make_tiered(num_ahead)
    run(loop, Request("first", PROMPT, max_tokens=3))
    evict(loop)
    again = Request("again", PROMPT, max_tokens=12)
    run(loop, again)
    assert again.output_token_ids == expect_alone(again, loop.config)
    assert sum(plan.num_tokens for plan in loop.plans) == 2 + 11, "computed what the host had"
    stats = loop.scheduler.stats()
    assert stats.num_loaded_pages == 5
    assert stats.num_prefix_hit_tokens == 20
    assert stats.num_saved_pages >= 5


def test_what_is_on_the_host_already_is_not_copied_again(make_tiered):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    run(loop, Request("again", PROMPT, max_tokens=1))
    num_saved = loop.scheduler.stats().num_saved_pages
    evict(loop)
    assert loop.scheduler.stats().num_saved_pages == num_saved


@pytest.mark.parametrize("return_by", ["copy", "recompute", "auto"])
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_preempted_request_gets_the_same_tokens_by_copy_and_by_recomputation(
    make_tiered, expect_alone, return_by, num_ahead
):
    loop = make_tiered(num_ahead, num_pages=13, max_model_len=40, kv_return_by=return_by)
    requests = [Request(name, [seed] * 10, max_tokens=30) for seed, name in enumerate(("first", "second", "third"))]
    loop.add(*requests)
    loop.run()
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_loaded_pages > 0) == (return_by != "recompute")


def test_who_waits_for_pages_holds_up_nobody(make_tiered, expect_alone):
    loop = make_tiered(1)
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    waiting, other = Request("waiting", PROMPT, max_tokens=3), Request("other", [5] * 6, max_tokens=9)
    loop.add(waiting, other)
    while not other.status.is_finished:  # the copy takes as long as it wants
        plan = loop.schedule()
        assert waiting.status is LOADING
        if plan is None or len(loop.in_flight) > 1:
            loop.update()
    assert other.output_token_ids == expect_alone(other, loop.config)
    loop.run()
    assert waiting.output_token_ids == expect_alone(waiting, loop.config)


def test_two_loads_that_cannot_both_fit_are_not_both_admitted(make_tiered, expect_alone):
    loop = make_tiered(max_num_batched_tokens=64)
    prompts = [[seed, *range(52)] for seed in (1, 2)]  # 14 pages each, of 24
    for prompt in prompts:
        run(loop, Request("first", prompt, max_tokens=1))
    evict(loop)
    one, two = (Request(f"r{index}", prompt, max_tokens=3) for index, prompt in enumerate(prompts))
    loop.add(one, two)
    loop.schedule()
    assert [one.status, two.status] == [LOADING, RequestStatus.WAITING]
    loop.run()
    for request in (one, two):
        assert request.output_token_ids == expect_alone(request, loop.config)
    assert loop.scheduler.stats().num_loaded_pages == 26


@pytest.mark.parametrize("which", ["save", "load"])
def test_a_page_whose_copy_failed_is_recomputed_and_never_cached(make_tiered, expect_alone, which):
    loop = make_tiered()
    first = Request("first", PROMPT, max_tokens=1)
    run(loop, first)
    loop.add(Request("long", LONG, max_tokens=15))
    while loop.scheduler.has_unfinished_requests:
        loop.step()
        while loop.copies:
            loop.copies.finish(fail=which == "save")
    again = Request("again", PROMPT, max_tokens=5)
    loop.add(again)
    loop.schedule()
    assert (again.status is LOADING) == (which == "load")
    while loop.copies:
        loop.copies.finish(fail=True)
    loop.run()
    assert again.output_token_ids == expect_alone(again, loop.config)
    stats = loop.scheduler.stats()
    assert stats.num_failed_pages >= 5
    assert stats.num_loaded_pages == stats.num_prefix_hit_tokens == 0
    tiers = loop.scheduler._pages.host_slots
    assert not any(key in tiers for key in first.page_keys)


def test_what_came_before_a_copy_failed_is_kept(make_tiered, expect_alone):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    again = Request("again", PROMPT, max_tokens=5)
    loop.add(again)
    loop.schedule()
    while len(loop.copies) > 2:
        loop.copies.finish()  # of what makes room for them
    loop.copies.finish()  # three pages
    loop.copies.finish(fail=True)  # the other two
    loop.run()
    assert again.output_token_ids == expect_alone(again, loop.config)
    assert loop.scheduler.stats().num_prefix_hit_tokens == 12


@pytest.mark.parametrize("num_done", [0, 1])
def test_who_leaves_while_its_pages_come_frees_them_at_once(make_tiered, expect_alone, num_done):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    leaver = Request("leaver", PROMPT, max_tokens=5)
    loop.add(leaver)
    until(loop, leaver, LOADING)
    while len(loop.copies) > 2 - num_done:  # what makes room goes first, then three pages and two
        loop.copies.finish()
    assert loop.scheduler.stats().num_used_pages == 5
    assert loop.scheduler.abort_request("leaver")
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().num_used_pages == 0
    other = Request("other", LONG, max_tokens=10)  # takes the pages; the rest of the copy must not be written there
    loop.add(other)
    loop.schedule()
    while loop.copies:
        loop.copies.finish()
    assert loop.scheduler.stats().num_loaded_pages == 3 * num_done, "counted what nobody wanted any more"
    loop.run()
    assert other.output_token_ids == expect_alone(other, loop.config)


def test_who_runs_takes_the_pages_of_a_later_load(make_tiered, expect_alone):
    loop = make_tiered(num_pages=17, max_model_len=64, max_num_batched_tokens=64)
    run(loop, Request("first", [*range(30)], max_tokens=1))
    run(loop, Request("long", [9] * 60, max_tokens=4))
    running = Request("running", [3] * 24, max_tokens=40)
    loop.add(running)
    loop.step()
    later = Request("later", [*range(30)], max_tokens=5)
    loop.add(later)
    until(loop, later, LOADING)
    while later.status is LOADING:  # its copy does not come
        loop.schedule()
        loop.update()
    assert running.status is RequestStatus.DECODING
    loop.run()
    for request in (running, later):
        assert request.output_token_ids == expect_alone(request, loop.config)
    assert running.num_given_up_tokens == 0, "was preempted"


def test_those_who_begin_alike_wait_for_one_copy(make_tiered, expect_alone):
    loop = make_tiered(1)
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    requests = [Request(f"r{index}", PROMPT, max_tokens=4) for index in range(4)]
    loop.add(*requests)
    loop.run()
    assert loop.scheduler.stats().num_loaded_pages == 5
    for request in requests:
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_pages_set_out_before_there_is_a_row(make_tiered, expect_alone):
    loop = make_tiered(max_num_seqs=1)
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    running, unknown, later = (
        Request("running", [3] * 5, max_tokens=30),
        Request("unknown", [4] * 5, max_tokens=3),
        Request("later", PROMPT, max_tokens=3),
    )
    loop.add(running, unknown, later)
    loop.step()
    assert running.row is not None
    assert [unknown.status, later.status] == [RequestStatus.WAITING, LOADING]
    while loop.copies:
        loop.copies.finish()
    assert later.status is RequestStatus.WAITING
    loop.run()
    for request in (running, unknown, later):
        assert request.output_token_ids == expect_alone(request, loop.config)
    order = [name for plan in loop.plans for name in [started.request_id for started in plan.started]]
    assert order == ["running", "unknown", "later"]


def test_those_who_wait_for_a_row_are_looked_at_now_and_then(make_tiered, monkeypatch):
    """A look costs what their prompts are long, and a full table is what a busy engine has in each step."""
    loop = make_tiered(max_num_seqs=1)
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    loop.add(Request("running", [3] * 5, max_tokens=60), *(Request(f"r{index}", LONG, max_tokens=1) for index in "abc"))
    loop.step()
    cache, looks = loop.scheduler._pages.cache, []
    longest_prefix = cache.longest_prefix
    monkeypatch.setattr(cache, "longest_prefix", lambda *args: looks.append(1) or longest_prefix(*args))
    for _ in range(32):
        loop.step()
    assert 0 < len(looks) <= 4 * 3 * 2  # four looks at three requests, on the device and on the host
    loop.run()


def test_a_reset_forgets_what_is_on_the_host_and_on_its_way(make_tiered, expect_alone):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    again = Request("again", PROMPT, max_tokens=5)
    loop.add(again)
    until(loop, again, LOADING)
    assert loop.scheduler.reset_prefix_cache()
    loop.scheduler.check_integrity()
    assert again.status is RequestStatus.WAITING
    assert loop.scheduler.stats().num_host_pages == 0
    loop.device.host_pages[:] = 60  # nobody will look
    loop.run()
    assert again.output_token_ids == expect_alone(again, loop.config)
    assert loop.scheduler.stats().num_prefix_hit_tokens == 0


def test_nobody_finds_what_a_failed_step_may_have_spoilt(make_tiered):
    loop = make_tiered()
    failed = Request("failed", PROMPT, max_tokens=30)
    loop.add(failed)
    loop.step()
    loop.step()
    while failed.num_tokens < 30:
        loop.step()
    pages = loop.scheduler._pages
    pages.cache.keys(failed)
    for page, key in enumerate(failed.page_keys, 1):
        pages.host_slots.save(key, page)
    assert all(key in pages.host_slots for key in failed.page_keys)
    assert len(failed.page_keys) > 5
    loop.scheduler.finish_request("failed", RequestStatus.FINISHED_ERROR)
    assert not any(key in pages.host_slots for key in failed.page_keys)


def test_slow_copies_give_way_to_computing(make_tiered, expect_alone):
    loop = make_tiered(kv_return_by="auto")
    for number in range(6):  # steps of a millisecond teach what computing costs
        request = Request(f"r{number}", [number] * (3 + 5 * number), max_tokens=3)
        loop.add(request)
        while not request.status.is_finished:
            loop.schedule()
            loop.clock.now += 0.001
            loop.update()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    again = Request("again", PROMPT, max_tokens=1)
    loop.add(again)
    until(loop, again, LOADING)
    for _ in range(2):  # a page takes a second to come
        loop.scheduler._pages.loads.take_in(0, 1, 1.0)
    loop.scheduler.load_failed(0)
    loop.scheduler.take_page_moves()  # There is nothing to write.
    run(loop, Request("first again", PROMPT, max_tokens=1))
    num_loaded = loop.scheduler.stats().num_loaded_pages
    evict(loop)
    again = Request("again once more", PROMPT, max_tokens=4)
    loop.add(again)
    loop.schedule()
    assert again.row is not None
    loop.run()
    assert again.output_token_ids == expect_alone(again, loop.config)
    assert loop.scheduler.stats().num_loaded_pages == num_loaded


def test_the_time_of_a_copy_is_learned_from_those_that_came(make_tiered):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    loop.add(Request("again", PROMPT, max_tokens=1))
    loop.schedule()
    loads = loop.scheduler._pages.loads
    assert loads.expected_seconds(10) is None
    for seconds, expected in ((1.0, 10.0), (3.0, 16.0), (3.0, 20.2)):
        loads.take_in(0, 1, seconds)
        assert loads.expected_seconds(10) == pytest.approx(expected)
    loop.scheduler.load_failed(0)
    loop.scheduler.take_page_moves()  # There is nothing to write.
    loop.run()


def test_what_was_once_slow_is_tried_again_after_a_while(make_tiered):
    """An estimate that keeps pages on the host would never be put right."""
    loop = make_tiered(kv_return_by="auto")

    def run_in_time(name, prompt, max_tokens=3):
        loop.add(request := Request(name, prompt, max_tokens=max_tokens))
        while not request.status.is_finished:
            if (plan := loop.schedule()) is None:
                return True  # waits for its pages
            loop.clock.now += 0.001 + 1e-4 * plan.num_tokens
            loop.update()
        return False

    for number in range(6):
        run_in_time(f"r{number}", [number] * (3 + 5 * number))
    run_in_time("first", PROMPT)
    run_in_time("long", LONG, 15)
    scheduler = loop.scheduler
    scheduler._pages.loads._seconds_per_page = 1.2 * scheduler._pacing.seconds_to_compute(4)
    for number in range(1, 9):
        scheduler._pages.pool.forget_cached()
        if run_in_time(f"again {number}", PROMPT):
            break
    assert 3 <= number < 8
    loop.run()


def test_a_stall_is_counted_with_its_time(make_tiered):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    loop.add(Request("again", PROMPT, max_tokens=1))
    for _ in range(3):
        assert loop.schedule() is None
        loop.clock.now += 0.5
    while loop.copies:
        loop.copies.finish()
    assert loop.schedule() is not None
    stats = loop.scheduler.stats()
    assert (stats.num_stalls, stats.stall_s) == (1, 1.5)
    loop.run()


def test_a_stall_ends_when_nobody_waits_any_more(make_tiered):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    loop.add(Request("again", PROMPT, max_tokens=1))
    for _ in range(3):
        assert loop.schedule() is None
        loop.clock.now += 0.5
    assert loop.scheduler.stats().stall_s == 1.0, "a stall that goes on is seen"
    loop.scheduler.abort_request("again")
    loop.clock.now += 3600.0
    loop.add(Request("other", [5] * 6, max_tokens=1, arrival_time=loop.clock.now))
    assert loop.schedule() is not None
    stats = loop.scheduler.stats()
    assert (stats.num_stalls, stats.stall_s) == (1, 1.0)
    loop.run()


def test_more_than_may_be_on_its_way_is_lost(make_tiered):
    loop = make_tiered(max_saving_pages=2)
    run(loop, Request("first", PROMPT, max_tokens=1))
    loop.add(Request("long", LONG, max_tokens=15))
    while loop.scheduler.has_unfinished_requests:
        loop.schedule()
        loop.update()  # no copy is ever done
    stats = loop.scheduler.stats()
    assert stats.num_host_pages == 2
    assert stats.num_lost_pages == 3


def test_loads_beyond_the_bound_wait_their_turn(make_tiered, expect_alone):
    loop = make_tiered(max_loading_pages=3, max_num_batched_tokens=64)
    prompts = [[seed, *range(20)] for seed in (1, 2)]
    for prompt in prompts:
        run(loop, Request("first", prompt, max_tokens=1))
    evict(loop)
    one, two = (Request(f"r{index}", prompt, max_tokens=3) for index, prompt in enumerate(prompts))
    loop.add(one, two)
    loop.schedule()
    assert [one.status, two.status] == [LOADING, RequestStatus.WAITING]  # the first is too large, and goes alone
    loop.run()
    for request in (one, two):
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_loads_ahead_keep_the_bound_too(make_tiered):
    loop = make_tiered(max_num_seqs=1, max_loading_pages=8, num_pages=49)
    prompts = [[seed, *range(20)] for seed in (1, 2, 3)]  # five pages each
    for prompt in prompts:
        run(loop, Request("first", prompt, max_tokens=1))
    for first in range(3):
        run(loop, Request("long", [first, *LONG], max_tokens=14))
    running = Request("running", [3] * 5, max_tokens=30)
    loop.add(running)
    loop.step()
    requests = [Request(f"r{index}", prompt, max_tokens=3) for index, prompt in enumerate(prompts)]
    loop.add(*requests)
    loop.step()
    assert [request.status is LOADING for request in requests] == [True, False, False]
    loop.run()


def test_a_load_too_large_for_the_bound_is_not_passed_by_smaller_ones_for_ever(make_tiered, expect_alone):
    loop = make_tiered(max_loading_pages=3, num_host_pages=200, num_pages=41)
    prompts = [[seed, *range(5)] for seed in range(1, 6)]
    for prompt in (PROMPT, *prompts):
        run(loop, Request("first", prompt, max_tokens=1))
    run(loop, Request("long", LONG, max_tokens=15))
    run(loop, Request("longer", LONG[::-1], max_tokens=15))
    small = [Request(f"r{index}", prompt, max_tokens=1) for index, prompt in enumerate(prompts)]
    large = Request("large", PROMPT, max_tokens=3)
    loop.add(small[0], large)
    for request in small[1:]:
        loop.schedule()
        assert large.status is RequestStatus.WAITING
        loop.add(request)  # while the one before is on its way
    loop.schedule()
    assert [request.status is LOADING for request in small] == [True, False, False, False, False]
    until_done = len(loop.copies)
    for _ in range(until_done):
        loop.copies.finish()
    loop.schedule()
    assert large.status is LOADING
    loop.run()
    for request in (*small, large):
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_room_for_the_rest_of_a_load_is_not_given_to_later_requests(make_tiered, expect_alone):
    loop = make_tiered(max_num_batched_tokens=96)
    prompts = [[seed, *range(20)] for seed in (1, 2)]  # five pages on the host
    for prompt in prompts:
        run(loop, Request("first", prompt, max_tokens=1))
    evict(loop)
    one, two = (Request(f"r{seed}", [*prompt, *[seed] * 33], max_tokens=3) for seed, prompt in enumerate(prompts))
    small, late = Request("small", [7] * 25, max_tokens=1), Request("late", [8] * 25, max_tokens=1)
    loop.add(one, two)  # 14 pages each, of 24
    loop.schedule()
    assert [one.status, two.status] == [LOADING, RequestStatus.WAITING]
    loop.scheduler.abort_request("r1")
    loop.add(small, late)  # seven pages each, and one for the row: there is room for one of them
    plan = loop.schedule()
    assert plan.started == [small]
    assert late.status is RequestStatus.WAITING
    loop.run()
    for request in (one, small, late):
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_pages_come_back_once_for_a_start(make_tiered, expect_alone):
    """What was lost again while a request waited for a row is computed: else it might wait for ever."""
    loop = make_tiered(max_num_seqs=1)
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    running, later = Request("running", [3] * 5, max_tokens=90), Request("later", PROMPT, max_tokens=3)
    loop.add(running, later)
    loop.step()
    assert later.status is LOADING
    while loop.copies:
        loop.copies.finish()
    while not running.status.is_finished:  # and takes all pages
        loop.step()
        assert later.status is RequestStatus.WAITING
    loop.scheduler._pages.pool.forget_cached()
    loop.schedule()
    assert later.row is not None
    assert not later.has_pages_back, "may not wait for them after a preemption"
    loop.run()
    assert later.output_token_ids == expect_alone(later, loop.config)
    evict(loop)
    num_loaded = loop.scheduler.stats().num_loaded_pages
    run(loop, Request("again", PROMPT, max_tokens=1))
    assert loop.scheduler.stats().num_loaded_pages == num_loaded + 5


def test_what_sets_out_ahead_leaves_the_prompt_that_is_being_read_its_pages(make_tiered, expect_alone):
    loop = make_tiered(max_num_seqs=1, max_num_batched_tokens=8)
    run(loop, Request("first", PROMPT, max_tokens=1))
    evict(loop)
    reading, later = Request("reading", LONG[::-1], max_tokens=3), Request("later", PROMPT, max_tokens=3)
    loop.add(reading, later)
    for number in range(1, 11):  # no copy is ever done
        loop.schedule()
        assert loop.plans[-1].num_tokens == 8, f"step {number}"
        loop.update()
    assert reading.num_output_tokens == 1
    loop.run()
    for request in (reading, later):
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_the_prompt_being_read_gives_way_once_to_an_urgent_one_whose_pages_are_far(make_tiered, expect_alone):
    loop = make_tiered(max_num_batched_tokens=8, max_loading_pages=1, num_pages=49)
    for prompt in (PROMPT, PROMPT[1:]):
        run(loop, Request("first", prompt, max_tokens=1))
    run(loop, Request("long", LONG, max_tokens=15))
    run(loop, Request("longer", [5, *LONG], max_tokens=15))
    run(loop, Request("longest", [6, *LONG], max_tokens=14))
    other, reading = (
        Request("other", PROMPT, max_tokens=1, options=RequestOptions(priority=1)),
        Request("reading", [9] * 80, max_tokens=1),
    )
    reading.priority = 1
    loop.add(other, reading)
    loop.step()
    assert other.status is LOADING
    assert reading.row is not None
    urgent = Request("urgent", PROMPT[1:], max_tokens=3)
    loop.add(urgent)
    for _ in range(8):  # no copy is done
        loop.step()
    assert urgent.status is RequestStatus.WAITING
    assert reading.num_output_tokens == 0
    assert loop.scheduler.stats().num_preemptions <= 1
    loop.run()
    for request in (other, reading, urgent):
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_a_salt_isolates_on_the_host_too(make_tiered):
    loop = make_tiered()
    run(loop, Request("first", PROMPT, max_tokens=1, options=RequestOptions(cache_salt="a")))
    evict(loop)
    run(loop, Request("other", PROMPT, max_tokens=1, options=RequestOptions(cache_salt="b")))
    assert loop.scheduler.stats().num_loaded_pages == 0
    run(loop, Request("same", PROMPT, max_tokens=1, options=RequestOptions(cache_salt="a")))
    assert loop.scheduler.stats().num_loaded_pages == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_host_pages": 5, "enable_prefix_caching": False}, "found by the prefix cache"),
        (
            {"kv_return_by": "carrier pigeon"},
            "kv_return_by is 'carrier pigeon'; it must be one of auto",
        ),
        ({"num_host_pages": -1}, "num_host_pages is -1; it must be an integer of at least 0"),
        ({"max_saving_pages": 0}, "max_saving_pages is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "page_size": 1, "num_pages": 3}
    with pytest.raises(SchedulerConfigError, match=message):
        SchedulerConfig(**(sizes | changes))


@pytest.mark.parametrize("windows", [(None,), (None, 9), (7, None, 7), (10,)])
def test_random_conversations_get_what_they_get_alone(make_tiered, expect_alone, windows):
    rng = np.random.default_rng(0)
    loop = make_tiered(1, num_host_pages=30 * len(windows), num_pages=1 + 24 * len(windows), windows=windows)
    histories = [rng.integers(0, 61, 10).tolist() for _ in range(8)]
    for turn in range(5):
        requests = [Request(f"{turn} {index}", history, max_tokens=6) for index, history in enumerate(histories)]
        loop.add(*requests)
        loop.run()
        for request, history in zip(requests, histories, strict=True):
            assert request.output_token_ids == expect_alone(request, loop.config)
            history += [*request.output_token_ids, *rng.integers(0, 61, 3).tolist()]
    assert loop.scheduler.stats().num_loaded_pages > 20
