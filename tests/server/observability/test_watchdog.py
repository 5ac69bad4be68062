"""The watchdog judges by progress."""

from types import SimpleNamespace

import pytest

from jaxllm.server.observability.watchdog import Watchdog


def figures(num_steps, num_running):
    return SimpleNamespace(num_steps=num_steps, scheduler=SimpleNamespace(num_running=num_running))


@pytest.fixture
def engine():
    return SimpleNamespace(state="ready", heartbeat_age_s=0.1, stats=figures(num_steps=0, num_running=0))


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def watchdog(engine, clock):
    return Watchdog(engine, 10.0, clock=lambda: clock.now)


def test_an_idle_engine_is_well_for_ever(watchdog, clock):
    clock.now += 1000
    assert watchdog.problem() is None


@pytest.mark.parametrize("state", ["starting", "restarting", "stopped"])
def test_an_engine_that_is_not_ready_is_a_problem(watchdog, engine, state):
    engine.state = state
    assert watchdog.problem() == f"the engine is {state}"


def test_a_silent_engine_is_a_problem(watchdog, engine):
    engine.heartbeat_age_s = 10.5
    assert watchdog.problem() == "the engine was last heard of 10.5 s ago; watchdog_s is 10"


def test_running_requests_without_steps_are_a_problem_although_the_engine_is_heard_of(watchdog, engine, clock):
    engine.stats = figures(num_steps=5, num_running=1)
    watchdog.look()
    clock.now += 9
    assert watchdog.problem() is None
    clock.now += 2
    assert watchdog.problem() == "requests run, and no step was done for 11.0 s; watchdog_s is 10"
    engine.stats.num_steps = 6
    assert watchdog.problem() is None


def test_a_new_request_after_a_long_silence_is_no_problem(watchdog, engine, clock):
    watchdog.look()
    clock.now += 1000
    watchdog.look()
    engine.stats.scheduler.num_running = 1
    assert watchdog.problem() is None
