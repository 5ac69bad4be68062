"""On real models: however requests are scheduled, greedy tokens stay the same."""

import dataclasses
import time

import numpy as np
import pytest

from jaxllm import LLM, RequestOptions, SamplingParams
from jaxllm.errors import OverloadedError
from jaxllm.scheduler import Scheduler


@pytest.fixture
def rescheduled():
    """Sets other scheduler settings on an `LLM`; gives it its own back at the end."""
    own = {}

    def change(llm, **settings):
        core = llm.engine.core
        while core._in_flight:
            core.step()
        scheduler = own.setdefault(core, core.scheduler)
        core.scheduler.check_integrity()
        core.scheduler = Scheduler(dataclasses.replace(scheduler.config, **settings))
        return core.scheduler

    yield change
    for core, scheduler in own.items():
        core._in_flight.clear()
        core.scheduler.check_integrity()
        core.scheduler = scheduler
        assert scheduler.reset_prefix_cache()  # Others have written to its pages.


def generate(llm, prompts, max_tokens, priorities=None):
    """The greedy tokens of prompts (token ids) that are served together."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine, outputs = llm.engine, {}
    for index, prompt in enumerate(prompts):
        priority = 0 if priorities is None else priorities[index]
        engine.add_request(str(index), prompt, params, RequestOptions(priority=priority, tenant=str(index % 3)))
        if index % 3 == 2:
            outputs |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[str(index)].outputs[0].token_ids for index in range(len(prompts))]


def run(engine):
    while engine.has_unfinished_requests:
        engine.step()


def prompts_of(vocab_size, num_prompts, num_shared, num_own, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab_size, num_shared).tolist()
    return [[*shared, *rng.integers(3, vocab_size, num_own + index).tolist()] for index in range(num_prompts)]


SETTINGS = {
    "cache": {},
    "no cache": {"enable_prefix_caching": False},
    "fcfs": {"scheduling_policy": "fcfs"},
    "fair": {"scheduling_policy": "fair"},
    "longest match first": {"prefix_window": 4},
    "merge window": {"max_wait_ms": 5.0, "min_batch": 4},
    "tpot target": {"tpot_target_ms": 1.0, "min_chunk_tokens": 8},
}


@pytest.mark.parametrize("name", ["tiny_llm", pytest.param("demo_llm", marks=pytest.mark.nightly)])
def test_greedy_tokens_do_not_depend_on_the_scheduling(request, rescheduled, name):
    llm = request.getfixturevalue(name)
    num_prompts, num_shared, num_own, max_tokens = (12, 60, 9, 12) if name == "tiny_llm" else (4, 66, 9, 5)
    prompts = prompts_of(llm.engine.vocab_size, num_prompts, num_shared, num_own)
    expected = None
    for settings in SETTINGS.values() if name == "tiny_llm" else [{}, SETTINGS["no cache"]]:
        scheduler = rescheduled(llm, **settings)
        tokens = generate(llm, prompts, max_tokens)
        expected = expected or tokens
        assert tokens == expected, settings
        has_hits = scheduler.stats().num_prefix_hit_tokens > 0
        assert has_hits == settings.get("enable_prefix_caching", True)
    scheduler = rescheduled(llm)
    assert generate(llm, prompts, max_tokens, priorities=[-index for index in range(num_prompts)]) == expected


@pytest.mark.nightly  # Which sizes the steps have is tested with the scheduler.
def test_a_tpot_target_gives_small_steps_and_the_same_tokens(tiny_llm, tiny_folder, monkeypatch):
    def serve(llm):
        """The tokens of each request, and the tokens of each step that was not for decodes alone."""
        launch, steps, outputs = llm.engine.runner.launch, [], {}
        monkeypatch.setattr(
            llm.engine.runner, "launch", lambda command: steps.append(command.bucket) or launch(command)
        )
        for index in range(7):
            llm.engine.add_request(str(index), [3 + index] * 9, params(50))
        for _ in range(12):
            llm.engine.step()
        [prompt] = prompts_of(llm.engine.vocab_size, 1, 0, 100)
        llm.engine.add_request("long", prompt, params(5))
        while llm.engine.has_unfinished_requests:
            outputs |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step()}
        return outputs, [bucket.num_tokens for bucket in steps if not bucket.is_decode_only]

    def params(max_tokens):
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "page_size": 16, "num_pages": 100}
    paced = LLM(str(tiny_folder), dtype="float32", **sizes, tpot_target_ms=0.001, compilation_cache_dir="")
    paced.engine.runner.wait_until_compiled()
    tokens, steps = serve(tiny_llm)
    paced_tokens, paced_steps = serve(paced)
    paced.engine.shutdown()
    assert paced_tokens == tokens
    assert set(steps) == {128}
    assert paced_steps.count(24) >= 5


@pytest.mark.parametrize(
    ("name", "enable_prefix_caching"),
    [("tiny_llm", True), ("tiny_llm", False), pytest.param("demo_llm", True, marks=pytest.mark.nightly)],
)
def test_greedy_tokens_survive_preemption(request, rescheduled, name, enable_prefix_caching):
    llm = request.getfixturevalue(name)
    engine = llm.engine
    num_own, max_tokens, num_pages = (20, 40, 23) if name == "tiny_llm" else (50, 30, 6)
    prompts = prompts_of(engine.vocab_size, 7 if name == "tiny_llm" else 4, 0, num_own, seed=1)
    expected = generate(llm, prompts, max_tokens)
    scheduler = rescheduled(llm, num_pages=num_pages, enable_prefix_caching=enable_prefix_caching)
    assert generate(llm, prompts, max_tokens) == expected
    assert scheduler.stats().num_preemptions > 0


def test_the_next_turn_of_a_conversation_finds_the_last_one(tiny_llm, rescheduled):
    scheduler = rescheduled(tiny_llm)
    [prompt] = prompts_of(tiny_llm.engine.vocab_size, 1, 0, 30)
    [answer] = generate(tiny_llm, [prompt], 20)
    before = scheduler.stats().num_prefix_hit_tokens
    generate(tiny_llm, [[*prompt, *answer, 5, 6]], 4)
    assert scheduler.stats().num_prefix_hit_tokens - before == 48


def test_a_step_that_raised_leaves_nothing_to_be_found(tiny_llm, rescheduled, monkeypatch):
    scheduler = rescheduled(tiny_llm)
    prompts = prompts_of(tiny_llm.engine.vocab_size, 2, 40, 9)
    launch, calls = tiny_llm.engine.runner.launch, []

    def fail_at_the_third(command):
        calls.append(command)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return launch(command)

    monkeypatch.setattr(tiny_llm.engine.runner, "launch", fail_at_the_third)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tiny_llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats.num_cached_pages == stats.num_used_pages == 0


def test_a_listener_that_raises_leaves_no_request_behind(tiny_llm):
    """Not even the one that a stop string ends in the same step."""
    engine = tiny_llm.engine
    [prompt] = prompts_of(engine.vocab_size, 1, 0, 20)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    [whole] = tiny_llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    stop = next(character for character in whole.outputs[0].text if character != "\ufffd")

    def listen(text):
        if stop in text:
            raise RuntimeError("deaf")

    stopping = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop=stop)
    engine.add_request("stops", prompt, stopping)
    engine.add_request("deaf", prompt, params, on_text=listen)
    with pytest.raises(RuntimeError, match="deaf"):
        run(engine)
    assert {output.request_id for output in engine.abort_all()} == {"stops", "deaf"}
    assert not engine.has_unfinished_requests
    engine.scheduler.check_integrity()
    [again] = tiny_llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert again.outputs[0].text == whole.outputs[0].text


def test_who_expires_in_a_step_that_raises_is_told(tiny_llm, monkeypatch):
    engine = tiny_llm.engine

    def fail(batch):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "launch", fail)
    engine.add_request("late", [5, 6], SamplingParams(max_tokens=3), RequestOptions(timeout_s=0.0))
    engine.add_request("other", [5, 6], SamplingParams(max_tokens=3))
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    reasons = {output.request_id: output.outputs[0].finish_reason for output in engine.abort_all()}
    assert reasons == {"late": "timeout", "other": "abort"}


def test_a_timeout_gives_what_there_is(tiny_llm):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine = tiny_llm.engine
    engine.add_request("late", [5, 6, 7], params, RequestOptions(timeout_s=0.2))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
        time.sleep(0.005)
    [output] = outputs
    assert output.outputs[0].finish_reason == "timeout"
    assert 0 < len(output.outputs[0].token_ids) < 100


def test_a_full_queue_is_an_error_of_its_own(tiny_llm, rescheduled):
    rescheduled(tiny_llm, max_queued_requests=1)
    engine = tiny_llm.engine
    params = SamplingParams(max_tokens=1)
    engine.add_request("a", [5], params)
    with pytest.raises(OverloadedError, match="1 requests are queued; max_queued_requests is 1") as refusal:
        engine.add_request("b", [5], params)
    assert refusal.value.retry_after_s is None
    run(engine)
