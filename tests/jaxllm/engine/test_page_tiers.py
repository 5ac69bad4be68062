"""What the device has no room for comes back from the host, and nothing but the time tells."""

import dataclasses

import pytest
from tiered_engine import OPTIONS, converse, tiered_llm, write_model

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.scheduler import Scheduler

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NUM_TURNS = 4


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def llm(request, tmp_path_factory):
    llm = tiered_llm(write_model(request.param, tmp_path_factory.mktemp(request.param)))
    yield llm
    llm.engine.shutdown()


def reschedule(llm, **settings):
    """A scheduler that knows nothing yet."""
    core = llm.engine.core
    mover = core.runner._mover
    while core._in_flight or mover._num_saving or mover._num_loading or mover._waiting_loads:
        llm.engine.step()
    core.scheduler = Scheduler(dataclasses.replace(core.scheduler.config, **settings))


@pytest.fixture(scope="module")
def expected(llm):
    """Of an engine that computes all again that it needs again."""
    config = llm.engine.scheduler.config
    reschedule(llm, enable_prefix_caching=False, num_host_pages=0)
    histories = converse(llm, PARAMS, NUM_TURNS)
    reschedule(llm, enable_prefix_caching=True, num_host_pages=config.num_host_pages)
    return histories


@pytest.mark.parametrize("return_by", ["copy", "recompute"])
def test_tiers_and_both_ways_back_give_the_same_tokens(llm, expected, return_by):
    reschedule(llm, kv_return_by=return_by)
    assert converse(llm, PARAMS, NUM_TURNS) == expected
    stats = llm.engine.scheduler.stats()
    assert stats.num_saved_pages > 30
    assert (stats.num_loaded_pages > 30) == (return_by == "copy")
    assert stats.num_failed_pages == 0
    assert llm.engine.core.stats().num_compilations_after_start == 0


def test_copies_that_fail_cost_time_only(llm, expected, monkeypatch):
    reschedule(llm, kv_return_by="copy")
    mover, calls = llm.engine.runner._mover, []

    def fail_at_times(function):
        def call(*args):
            calls.append(function)
            if len(calls) % 3 == 0:
                raise MemoryError("no room")
            return function(*args)

        return call

    monkeypatch.setattr(mover, "_put", fail_at_times(mover._put))
    monkeypatch.setattr(mover, "_get", fail_at_times(mover._get))
    assert converse(llm, PARAMS, NUM_TURNS) == expected
    assert llm.engine.scheduler.stats().num_failed_pages > 0


def test_host_memory_that_holds_no_page_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="host_kv_gb is 1e-09, and a page of the KV cache has"):
        LLM(str(tiny_folder), **OPTIONS, host_kv_gb=1e-9)
