"""Tenants share by what they have had, and one that has left leaves nothing behind."""

import random

import pytest

from jaxllm.scheduler import Request, RequestOptions, RequestRefusedError, SchedulerBusyError, TenantConfig


def flood(tenant, number, **kind):
    return [
        Request(
            f"{tenant}{index}",
            [index % 60] * 9,
            max_tokens=2,
            options=RequestOptions(tenant=tenant),
            use_prefix_cache=False,
            **kind,
        )
        for index in range(number)
    ]


def turns(loop, *tenants):
    """The tenants in the order in which their requests got their first token, from the last one's first on."""
    order = [name.rstrip("0123456789") for name in loop.streams]
    return [tenant for tenant in order[order.index(tenants[-1]) :] if tenant in tenants]


@pytest.mark.parametrize(("policy", "limit"), [("priority", 10_000), ("fair", None)])
def test_accounts_of_tenants_that_have_left_are_closed(make_loop, policy, limit):
    loop = make_loop(scheduling_policy=policy, default_tenant=TenantConfig(max_tokens_per_minute=limit))
    for index in range(200):
        loop.add(Request("a", [1, 2], max_tokens=2, options=RequestOptions(tenant=f"t{index}")))
        loop.run()
        loop.clock.now += 3.0
    assert len(loop.scheduler._tenants.accounts) < 130


def test_refused_requests_leave_no_accounts_behind(make_loop):
    loop = make_loop(default_tenant=TenantConfig(max_tokens_per_minute=10))
    for index in range(400):
        with pytest.raises(RequestRefusedError, match="max_tokens_per_minute is 10"):
            loop.add(Request("a", [1, 2], max_tokens=20, options=RequestOptions(tenant=f"t{index}")))
    assert len(loop.scheduler._tenants.accounts) < 130


def test_an_account_that_is_not_closed_keeps_what_it_owes(make_loop):
    """A tenant at its limit does not get a new one by being forgotten."""
    loop = make_loop(default_tenant=TenantConfig(max_tokens_per_minute=20))
    loop.add(Request("a", [1, 2], max_tokens=18, options=RequestOptions(tenant="spent")))
    loop.run()
    for index in range(400):
        loop.add(Request("a", [1, 2], max_tokens=1, options=RequestOptions(tenant=f"t{index}")))
        loop.run()
    with pytest.raises(SchedulerBusyError, match="and 0 of the tenant's max_tokens_per_minute 20 are left"):
        loop.add(Request("a", [1, 2], max_tokens=18, options=RequestOptions(tenant="spent")))


def test_what_a_tenant_had_before_all_was_idle_is_not_held_against_it(make_loop):
    loop = make_loop(scheduling_policy="fair", max_num_seqs=1)
    loop.add(*flood("past", 60))
    loop.run()
    loop.add(*flood("new", 20))
    for _ in range(3):
        loop.step()
    loop.add(
        *flood("old", 10),
        *(Request(f"past{60 + i}", [1] * 9, max_tokens=2, options=RequestOptions(tenant="past")) for i in range(10)),
    )
    loop.run()
    order = list(loop.streams)
    assert order.index("past60") < order.index("new5")


def test_a_tenant_that_asks_for_little_leaves_no_credit_to_others(make_loop):
    """One that always runs and never waits has had little. Who comes new starts level with those that wait."""
    loop = make_loop(scheduling_policy="fair", max_num_seqs=2)
    loop.add(Request("little", [1], max_tokens=120, options=RequestOptions(tenant="little")))
    loop.step()
    loop.add(*flood("busy", 60))
    while "busy30" not in loop.streams:
        loop.step()
    loop.add(*flood("late", 20))
    loop.run()
    assert turns(loop, "busy", "late")[:8].count("busy") >= 3


@pytest.mark.parametrize("is_ready", [True, False])
def test_who_leaves_before_it_has_started_gives_back_all_that_it_reserved(make_loop, is_ready):
    loop = make_loop(default_tenant=TenantConfig(max_tokens_per_minute=50))
    for index in range(5):
        loop.add(Request(f"r{index}", [1] * 20, max_tokens=30, is_ready=is_ready))
        assert loop.scheduler.abort_request(f"r{index}")
        loop.scheduler.check_integrity()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_no_minute_has_more_tokens_than_the_limit_and_who_waits_as_told_is_let_in(make_loop, seed):
    """Requests at any times, after idle times too; the tokens that were not used are another's."""
    rng, limit = random.Random(seed), 30
    loop = make_loop(max_num_seqs=2, default_tenant=TenantConfig(max_tokens_per_minute=limit))
    taken: list[tuple[float, int]] = []
    waits_s: list[float] = []
    for index in range(150):
        loop.clock.now += rng.choice([0.0, 0.3, 2.0, 7.7, 90.0])
        request = Request(f"r{index}", [1] * rng.randint(1, 12), max_tokens=rng.randint(1, 18))
        try:
            loop.add(request)
        except SchedulerBusyError as busy:
            waits_s.append(busy.retry_after_s)
            loop.clock.now += busy.retry_after_s
            loop.add(request)
        entered = loop.clock.now
        if rng.random() < 0.3:
            loop.scheduler.abort_request(request.request_id)
        loop.run()
        loop.scheduler.check_integrity()
        taken.append((entered, request.num_tokens if request.has_started else 0))
        assert sum(number for when, number in taken if when > entered - 60.0) <= limit
    assert waits_s
    assert 0.0 < min(waits_s) <= max(waits_s) <= 61.0
