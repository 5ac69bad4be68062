"""The loop on a tiny model: what a request gives depends on nothing but itself, and leaving frees at once."""

import itertools
import random

import jax
import numpy as np
import pytest

from jaxllm import RequestOptions, SamplingParams
from jaxllm.errors import InvalidRequestError

COMPILED = "/jax/core/compile/backend_compile_duration"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(3, 256, length).tolist() for length in (1, 100, 9, 60)]


def tokens(llm, prompts, params):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def others(count, seed=1):
    """Prompts and settings of all kinds, to be served beside a request."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 256, rng.integers(1, 110)).tolist() for _ in range(count)]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 5, "seed": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 2.0, "min_p": 0.1, "top_k": 50, "top_p": 0.9},
    ]
    kinds = itertools.islice(itertools.cycle(kinds), count)
    return prompts, [SamplingParams(max_tokens=int(rng.integers(1, 18)), **kind) for kind in kinds]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=12, max_tokens=24, ignore_eos=True),
    ],
    ids=["greedy", "sampled", "truncated"],
)
def test_a_request_gives_the_same_tokens_alone_and_among_many(tiny_llm, params):
    """Among more requests than rows, its prompt is cut into chunks by what is left of the budget."""
    other_prompts, other_params = others(31)
    for prompt in PROMPTS:
        [alone] = tokens(tiny_llm, [prompt], params)
        for place in (0, 16, 31):
            prompts = [*other_prompts[:place], prompt, *other_prompts[place:]]
            together = tokens(tiny_llm, prompts, [*other_params[:place], params, *other_params[place:]])
            assert together[place] == alone


def test_seeds_tell_requests_apart(tiny_llm):
    seeds = [0, 1, 2**31, 2**32 - 1, 0]
    sampled = [SamplingParams(temperature=1.0, seed=seed, ignore_eos=True) for seed in seeds]
    results = tokens(tiny_llm, [PROMPTS[2]] * len(seeds), sampled)
    assert results[0] == results[-1]
    assert len({tuple(result) for result in results}) == len(seeds) - 1


def test_requests_without_a_seed_take_theirs_from_that_of_the_engine(tiny_llm, monkeypatch):
    unseeded = SamplingParams(temperature=1.0, ignore_eos=True)

    def run(seed):
        monkeypatch.setattr(tiny_llm.engine.core, "_seeds", random.Random(seed))
        return tokens(tiny_llm, [PROMPTS[2]] * 2, unseeded) + tokens(tiny_llm, [PROMPTS[2]], unseeded)

    first = run(seed=tiny_llm.engine.config.options.seed)
    assert len({tuple(result) for result in first}) == 3
    assert run(seed=0) == first
    assert run(seed=1) != first


def test_nothing_is_compiled_once_the_programs_are(tiny_llm):
    compiled = []

    def listen(event, duration_secs, **kwargs):
        if event == COMPILED:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        prompts, params = others(60, seed=2)
        tokens(tiny_llm, prompts, params)
        for prompt, sampled in zip(prompts[:10], params, strict=False):
            assert "".join(tiny_llm.stream({"prompt_token_ids": prompt}, sampled)) is not None
        stream = tiny_llm.stream("hello", SamplingParams(stop=["zz"], max_tokens=50))
        next(stream)
        tokens(tiny_llm, prompts[:20], params[:20])
        stream.close()
        tiny_llm.chat([{"role": "user", "content": "hello"}], SamplingParams(top_p=0.5))
        assert compiled == []
        jax.jit(lambda x: x * 3)(np.float32(compiled == []))
        assert len(compiled) == 1  # What the listener is for.
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def run_until_finished(engine):
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def test_a_request_may_leave_in_any_state(tiny_llm):
    """After n steps of 18 requests some wait, some are in their prompts, some write."""
    engine, scheduler = tiny_llm.engine, tiny_llm.engine.scheduler
    prompts = [[3 + i, *PROMPTS[3]] for i in range(18)]  # They share no page.
    expected = tokens(tiny_llm, prompts, GREEDY)
    for num_steps in range(14):
        for i in range(18):
            engine.add_request(str(i), prompts[i], GREEDY)
        for _ in range(num_steps):
            engine.step()
        for i in range(17):
            used = scheduler.stats().num_used_pages
            num_pages = 0
            if (row := scheduler._requests[str(i)].row) is not None:
                num_pages = int(scheduler.table.num_pages[row])
            output = engine.abort_request(str(i))
            assert scheduler.stats().num_used_pages == used - num_pages
            [completion] = output.outputs
            assert completion.finish_reason == "abort"
            assert completion.token_ids == expected[i][: len(completion.token_ids)]
            assert engine.abort_request(str(i)) is None
        scheduler.check_integrity()
        outputs = run_until_finished(engine)
        assert list(outputs) == ["17"]
        assert outputs["17"].outputs[0].token_ids == expected[17]


def test_ids_are_unique_among_unfinished_requests(tiny_llm):
    engine = tiny_llm.engine
    engine.add_request("a", PROMPTS[2], GREEDY, prompt="first")
    with pytest.raises(InvalidRequestError, match="'a': this request_id belongs to a request"):
        engine.add_request("a", PROMPTS[3], GREEDY, prompt="second")
    outputs = run_until_finished(engine)
    assert outputs["a"].prompt == "first"
    assert outputs["a"].outputs[0].token_ids == tokens(tiny_llm, [PROMPTS[2]], GREEDY)[0]
    engine.add_request("a", PROMPTS[3], GREEDY)
    assert run_until_finished(engine)["a"].outputs[0].token_ids == tokens(tiny_llm, [PROMPTS[3]], GREEDY)[0]


def test_the_more_urgent_is_served_first(tiny_llm):
    engine, order = tiny_llm.engine, []
    for i in range(20):
        engine.add_request(str(i), PROMPTS[2], GREEDY, RequestOptions(priority=5))
    engine.add_request("urgent", PROMPTS[2], GREEDY, RequestOptions(priority=1))
    while engine.has_unfinished_requests:
        order += [output.request_id for output in engine.step()]
    assert set(order[:16]) == {*map(str, range(15)), "urgent"}


def test_times_are_in_order(tiny_llm):
    for output in tiny_llm.generate(["hello"] * 20, GREEDY, use_tqdm=False):
        metrics = output.metrics
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.finished_time,
        ]
        assert times == sorted(times)
        assert metrics.num_output_tokens == 24
        assert 0 < metrics.tpot_s < metrics.finished_time - metrics.arrival_time


def test_after_a_step_that_raised_abort_all_ends_what_was_in_it(tiny_llm):
    engine, heard = tiny_llm.engine, []
    expected = tokens(tiny_llm, [PROMPTS[2]], GREEDY)[0]

    def listen(text):
        heard.append(text)
        if len(heard) == 5:
            raise RuntimeError("the client is gone")

    engine.add_request("a", PROMPTS[2], GREEDY, on_text=listen)
    engine.add_request("b", PROMPTS[3], GREEDY)
    with pytest.raises(RuntimeError, match="the client is gone"):
        run_until_finished(engine)
    ended = {output.request_id: output for output in engine.abort_all()}
    assert set(ended) == {"a", "b"}
    assert ended["a"].outputs[0].text.startswith("".join(heard[:5]))
    assert engine.scheduler.stats().num_used_pages == 0
    assert tokens(tiny_llm, [PROMPTS[2]], GREEDY)[0] == expected
