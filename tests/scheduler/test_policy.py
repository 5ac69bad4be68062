"""Who goes first, who gives way, and who cannot be starved."""

import pytest

from jaxllm.scheduler import (
    Request,
    RequestOptions,
    RequestRefusedError,
    RequestStatus,
    SchedulerBusyError,
    TenantConfig,
)
from jaxllm.scheduler.waiting_queue import WaitingQueue


def served_tokens(loop, *tenants):
    ledger = loop.scheduler._tenants
    return [ledger.virtual_tokens(tenant) * loop.config.tenant(tenant).weight for tenant in tenants]


def test_first_come_first_served_knows_no_priority(make_loop):
    loop = make_loop(scheduling_policy="fcfs", max_num_seqs=1)
    with pytest.raises(RequestRefusedError, match=r"priority is -1, and scheduling_policy is 'fcfs'"):
        loop.add(Request("urgent", [1], max_tokens=1, options=RequestOptions(priority=-1)))
    loop.add(Request("b", [1], max_tokens=1, arrival_time=2.0), Request("a", [1], max_tokens=1, arrival_time=1.0))
    loop.run()
    assert list(loop.streams) == ["a", "b"]


def test_priority_ties_go_by_arrival(make_loop):
    loop = make_loop(max_num_seqs=1)
    loop.add(
        *(
            Request(f"r{index}", [1], max_tokens=1, options=RequestOptions(priority=3), arrival_time=1.0)
            for index in range(5)
        )
    )
    loop.add(Request("earlier", [1], max_tokens=1, options=RequestOptions(priority=3), arrival_time=0.5))
    loop.run()
    assert list(loop.streams) == ["earlier", "r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("lacking", ["rows", "pages"])
def test_an_urgent_request_takes_the_room_of_less_urgent_ones(make_loop, expect_alone, lacking, num_ahead):
    sizes = {"rows": {"max_num_seqs": 3}, "pages": {"num_pages": 16, "max_model_len": 40}}[lacking]
    loop = make_loop(num_ahead, **sizes)
    low = [
        Request(f"low{index}", [index] * 12, max_tokens=25, options=RequestOptions(priority=5 - index))
        for index in range(3)
    ]
    loop.add(*low)
    for _ in range(4):
        loop.step()
    urgent = Request("urgent", [7] * 16, max_tokens=4, options=RequestOptions(priority=-1))
    loop.add(urgent)
    loop.step()
    assert urgent.row is not None
    assert low[0].status is RequestStatus.PREEMPTED, "the lowest gives way"
    assert low[2].row is not None
    loop.run()
    for request in [urgent, *low]:
        assert request.output_token_ids == expect_alone(request, loop.config)
        assert request.output_token_ids == loop.streams[request.request_id]


def test_an_urgent_request_does_not_wait_for_a_long_prompt_of_less_urgency(make_loop, expect_alone):
    loop = make_loop(1, max_num_batched_tokens=8)
    long = Request("long", [index % 60 for index in range(100)], max_tokens=3, options=RequestOptions(priority=1))
    loop.add(long)
    for _ in range(5):
        loop.step()
    urgent = Request("urgent", [7] * 6, max_tokens=3)
    loop.add(urgent)
    loop.step()
    assert urgent.row is not None
    loop.run()
    assert long.output_token_ids == expect_alone(long, loop.config)
    assert loop.scheduler.stats().num_recomputed_tokens < 4 + 8, "the cache has kept what was computed"


def test_who_cannot_make_enough_room_preempts_nobody(make_loop):
    loop = make_loop(num_pages=20, max_model_len=72)
    mighty = Request("mighty", [1] * 30, max_tokens=20, options=RequestOptions(priority=-2))
    low = Request("low", [2] * 12, max_tokens=20, options=RequestOptions(priority=5))
    loop.add(mighty, low)
    loop.step()
    loop.add(Request("urgent", [3] * 60, max_tokens=4, options=RequestOptions(priority=-1)))
    loop.step()
    assert low.row is not None
    loop.run()


def test_a_long_queue_of_many_tenants_costs_a_full_table_nothing(make_loop, monkeypatch):
    """Nobody is looked for while nobody can start."""
    loop = make_loop(max_num_seqs=2)
    loop.add(
        *(Request(f"r{index}", [1], max_tokens=20, options=RequestOptions(tenant=f"t{index}")) for index in range(50))
    )
    loop.step()
    looks = []
    first = WaitingQueue.first
    monkeypatch.setattr(WaitingQueue, "first", lambda *args: looks.append(1) or first(*args))
    for _ in range(10):
        loop.step()
    assert not looks
    loop.add(Request("urgent", [1], max_tokens=1, options=RequestOptions(priority=-1)))
    loop.step()
    assert "urgent" in loop.streams
    loop.run()


def test_pages_that_it_would_share_with_who_gives_way_are_not_room(make_loop):
    loop = make_loop(num_pages=20, max_model_len=72)
    mighty = Request("mighty", [1] * 30, max_tokens=20, options=RequestOptions(priority=-2))
    low = Request("low", [2] * 12, max_tokens=20, options=RequestOptions(priority=5))
    loop.add(mighty, low)
    loop.step()
    loop.step()
    loop.add(Request("urgent", [2] * 12 + [3] * 32, max_tokens=4, options=RequestOptions(priority=-1)))
    loop.step()
    assert low.row is not None
    loop.run()


def test_pages_that_those_who_give_way_share_are_room(make_loop, expect_alone):
    loop = make_loop(num_pages=20, max_model_len=76)
    low = [
        Request(f"low{index}", [2] * 20 + [index], max_tokens=20, options=RequestOptions(priority=5))
        for index in range(2)
    ]
    loop.add(*low)
    for _ in range(3):
        loop.step()
    assert all(request.row is not None for request in low)
    urgent = Request("urgent", [3] * 72, max_tokens=4, options=RequestOptions(priority=-1))
    loop.add(urgent)
    loop.step()
    assert urgent.row is not None
    loop.run()
    for request in (urgent, *low):
        assert request.output_token_ids == expect_alone(request, loop.config)


def test_a_flood_of_one_tenant_does_not_starve_another(make_loop):
    loop = make_loop(scheduling_policy="fair", max_num_seqs=2, max_num_batched_tokens=16)
    loop.add(
        *(
            Request(f"flood{index}", [index] * 12, max_tokens=4, options=RequestOptions(tenant="flood"))
            for index in range(40)
        )
    )
    for _ in range(5):
        loop.step()
    loop.add(
        *(
            Request(f"calm{index}", [index + 30] * 12, max_tokens=4, options=RequestOptions(tenant="calm"))
            for index in range(3)
        )
    )
    loop.run()
    order = list(loop.streams)
    assert max(order.index(f"calm{index}") for index in range(3)) < 12


def test_tenants_get_tokens_by_their_weights(make_loop):
    tenants = {"heavy": TenantConfig(weight=3.0)}
    loop = make_loop(scheduling_policy="fair", tenants=tenants, max_num_seqs=2, max_num_batched_tokens=16)
    for index in range(60):
        for tenant in ("heavy", "light"):
            loop.add(
                Request(
                    f"{tenant}{index}",
                    [index] * 10,
                    max_tokens=5,
                    options=RequestOptions(tenant=tenant),
                    use_prefix_cache=False,
                )
            )
    for _ in range(150):
        loop.step()
    heavy, light = served_tokens(loop, "heavy", "light")
    assert 2.5 < heavy / light < 3.5
    loop.run()


def test_tenants_take_turns_within_a_step(make_loop):
    loop = make_loop(scheduling_policy="fair", max_num_seqs=6, max_num_batched_tokens=120)
    for tenant in "abc":
        loop.add(
            *(
                Request(f"{tenant}{index}", [index] * 20, max_tokens=2, options=RequestOptions(tenant=tenant))
                for index in range(9)
            )
        )
    plan = loop.schedule()
    assert sorted(request.tenant for request in plan.started) == ["a", "a", "b", "b", "c", "c"]
    loop.run()
    assert sum(served_tokens(loop, "a", "b", "c")) == sum(plan.num_tokens for plan in loop.plans)


def test_a_tenant_does_not_save_up_while_it_has_no_requests(make_loop):
    loop = make_loop(scheduling_policy="fair", max_num_seqs=1)
    loop.add(
        *(
            Request(f"busy{index}", [index] * 9, max_tokens=9, options=RequestOptions(tenant="busy"))
            for index in range(20)
        )
    )
    for _ in range(60):
        loop.step()
    loop.add(
        *(
            Request(f"late{index}", [index] * 9, max_tokens=9, options=RequestOptions(tenant="late"))
            for index in range(10)
        )
    )
    loop.run()
    order = [name for name in loop.streams if int(name[4:]) < 10 or name.startswith("busy")]
    after = order[order.index("late0") :]
    assert after[:6] != [f"late{index}" for index in range(6)], "late made up for the time when it was away"


def test_within_a_tenant_priority_counts(make_loop):
    loop = make_loop(scheduling_policy="fair", max_num_seqs=1)
    loop.add(
        Request("a", [1], max_tokens=1, options=RequestOptions(tenant="x", priority=1)),
        Request("b", [1], max_tokens=1, options=RequestOptions(tenant="x")),
    )
    loop.run()
    assert list(loop.streams) == ["b", "a"]


def test_a_tenant_at_its_quota_does_not_delay_others(make_loop):
    loop = make_loop(tenants={"small": TenantConfig(max_running=1)}, max_num_seqs=4)
    small = [
        Request(f"small{index}", [1, index], max_tokens=6, options=RequestOptions(tenant="small")) for index in range(3)
    ]
    other = Request("other", [2], max_tokens=6, options=RequestOptions(tenant="other"))
    loop.add(*small, other)
    loop.step()
    assert [request.row is not None for request in (*small, other)] == [True, False, False, True]
    while loop.scheduler.has_unfinished_requests:
        loop.step()
        assert sum(request.row is not None for request in small) <= 1
    loop.run()


def test_a_tenant_over_its_queue_is_refused_at_once_with_the_reason(make_loop):
    loop = make_loop(default_tenant=TenantConfig(max_queued=2), max_num_seqs=1)
    for index in range(2):
        loop.add(Request(f"r{index}", [1], max_tokens=2))
    with pytest.raises(SchedulerBusyError, match="2 of the tenant's requests are queued; max_queued is 2"):
        loop.add(Request("r2", [1], max_tokens=2))
    loop.step()
    loop.add(
        Request("r2", [1], max_tokens=2), Request("other", [1], max_tokens=2, options=RequestOptions(tenant="other"))
    )
    loop.run()


def test_tokens_per_minute_are_reserved_given_back_and_free_again_after_a_minute(make_loop):
    loop = make_loop(tenants={"t": TenantConfig(max_tokens_per_minute=60)}, max_num_seqs=1)

    def request(name, max_tokens=40):
        return Request(
            name, [1] * 10, max_tokens=max_tokens, options=RequestOptions(tenant="t"), stop_token_ids=tuple(range(61))
        )

    with pytest.raises(RequestRefusedError, match="make up to 61 tokens; max_tokens_per_minute is 60"):
        loop.add(request("huge", 51))
    loop.add(request("a"))
    with pytest.raises(SchedulerBusyError, match=r"may take 50 tokens, and 10 of .* 60 are left") as busy:
        loop.add(request("b"))
    assert busy.value.retry_after_s == pytest.approx(61.0)
    loop.run()  # It stops at its first token and gives 39 back.
    loop.clock.now = 30.5
    loop.add(request("b", 39))
    loop.run()
    with pytest.raises(SchedulerBusyError, match=r"may take 50 tokens, and 38 of") as busy:
        loop.add(request("c"))
    assert busy.value.retry_after_s == pytest.approx(60.5)  # When all of second 30 is a minute ago.
    loop.clock.now = 61.0
    loop.add(request("c", 39))
    loop.run()
    loop.clock.now = 30.5 + busy.value.retry_after_s
    loop.add(request("d", 39))
    loop.run()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"weight": 0.0}, "weight is 0.0; it must be a number above 0"),
        ({"max_running": 0}, "max_running is 0; it must be an integer of at least 1"),
        ({"max_tokens_per_minute": -5}, "max_tokens_per_minute is -5"),
    ],
)
def test_a_tenant_that_could_never_run_is_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        TenantConfig(**limits)
