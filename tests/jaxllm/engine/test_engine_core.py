"""What the core tells, step by step, and what is left of it when a step fails."""

import numpy as np
import pytest

from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.outputs import TokenLogprobs
from jaxllm.scheduler import RequestStatus

rng = np.random.default_rng(3)
PROMPTS = [rng.integers(3, 256, length).tolist() for length in (40, 9, 100, 25)]


@pytest.fixture
def core(tiny_llm):
    """16 rows, 128 tokens a step, pages of 8 tokens. Its prefix cache is empty."""
    core = tiny_llm.engine.core
    while core._in_flight:
        core.step()
    assert core.reset_prefix_cache()
    core._reports.take()
    yield core
    while core.has_unfinished_requests:
        core.step()


def request(name, prompt, max_tokens=20, **options):
    return CoreRequest(request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, **options)


class Ear:
    """Hears what the core tells."""

    def __init__(self):
        self.token_ids, self.ends, self.started, self.logprobs, self.num_reports = {}, {}, {}, {}, {}

    def hear(self, output):
        assert len(set(output.keys)) == len(output.keys)
        for key, when, num_cached_tokens in output.started:
            assert key not in self.started
            self.started[key] = when, num_cached_tokens
        for key, token_ids in output.tokens_by_key():
            assert key in self.started
            assert key not in self.ends
            assert token_ids
            self.token_ids[key] = self.token_ids.get(key, []) + token_ids
            self.logprobs[key] = self.logprobs.get(key, []) + output.logprobs.get(key, [])
            self.num_reports[key] = self.num_reports.get(key, 0) + 1
        for key, reason, error in output.finished:
            assert key not in self.ends
            self.ends[key] = reason, error
        assert set(output.logprobs) <= set(output.keys)

    def run(self, core):
        while core.has_unfinished_requests:
            self.hear(core.step())


def answers(core, requests):
    ear = Ear()
    for one in requests:
        core.add_request(one)
    ear.run(core)
    return ear


def test_who_does_not_stream_tells_two_times(core):
    """The first token and the rest, whatever others do, and in spite of preemption."""
    requests = [request(str(number), PROMPTS[number % 4], streams=number % 2 == 0) for number in range(24)]
    ear = answers(core, requests)
    for number in range(24):
        assert ear.ends[str(number)] == ("length", None)
        assert len(ear.token_ids[str(number)]) == 20
        assert ear.token_ids[str(number)] == ear.token_ids[str(number % 4)]
        assert ear.num_reports[str(number)] == (20 if number % 2 == 0 else 2)


def test_log_probabilities_of_who_does_not_stream_come_with_the_tokens(core):
    ear = answers(core, [request("a", PROMPTS[0], num_logprobs=2, streams=False)])
    assert ear.num_reports["a"] == 2
    assert [token.token_id for token in ear.logprobs["a"]] == ear.token_ids["a"]


def test_a_preempted_request_starts_once_and_loses_no_token(core):
    expected = answers(core, [request(str(number), PROMPTS[number], max_tokens=25) for number in range(4)])
    for number in range(4):
        core.add_request(request(str(number), PROMPTS[number], max_tokens=25, streams=number < 2))
    ear = Ear()
    for _ in range(12):
        ear.hear(core.step())
        core.reset_prefix_cache(force=True)  # It preempts all, and one step is in flight.
    ear.run(core)
    assert core.scheduler.stats().num_preemptions > 4
    assert ear.token_ids == expected.token_ids


def test_an_end_from_outside_brings_what_was_not_told(core):
    for streams in (True, False):
        core.add_request(request("a", PROMPTS[1], max_tokens=60, streams=streams))
        ear = Ear()
        for _ in range(9):
            ear.hear(core.step())
        output = core.end_request("a", "abort")
        ear.hear(output)
        assert ear.ends == {"a": ("abort", None)}
        assert len(ear.token_ids["a"]) == 8  # One step is in flight.
        assert core.end_request("a", "abort") is None
        assert not core.step()


def test_min_tokens_keep_the_stop_tokens_from_ending(core):
    whole = answers(core, [request("a", PROMPTS[1])]).token_ids["a"]
    for min_tokens in (0, 1, 5, 20):
        ear = answers(core, [request("a", PROMPTS[1], stop_token_ids=tuple(whole), min_tokens=min_tokens)])
        assert ear.token_ids["a"] == whole[: max(1, min_tokens)]


# Failed steps


class Broken:
    """Fails in the n-th call of a method, and records who runs then."""

    def __init__(self, monkeypatch, owner, name, call):
        original, self.number = getattr(owner, name), 0

        def fail(*args):
            self.number += 1
            if self.number == call:
                raise RuntimeError("a defect")
            return original(*args)

        monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("place", ["launch", "result", "reports"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_failed_step_ends_its_own_requests_and_the_others_are_right(core, monkeypatch, place, call):
    from jaxllm.engine.runner import StepHandle

    requests = [request(str(number), PROMPTS[number % 4]) for number in range(20)]  # 4 have to wait
    expected = answers(core, requests).token_ids
    core.reset_prefix_cache()
    owner, name = {
        "launch": (core.runner, "launch"),
        "result": (StepHandle, "sampled"),
        "reports": (core._reports, "_append"),
    }[place]
    Broken(monkeypatch, owner, name, call)
    for one in requests:
        core.add_request(one)
    ear = Ear()
    while core.has_unfinished_requests:
        try:
            ear.hear(core.step())
        except RuntimeError as error:
            ear.hear(core.recover(error))
            core.scheduler.check_integrity()
    failed = {name for name, (reason, _) in ear.ends.items() if reason == "error"}
    assert failed
    assert len(failed) < 20
    assert all(ear.ends[key][1] == "the step that the request was in failed: RuntimeError: a defect" for key in failed)
    for number in range(20):
        tokens = ear.token_ids.get(str(number), [])
        assert tokens == expected[str(number)][: len(tokens)]
        assert str(number) in failed or len(tokens) == 20
    # What is left in the prefix cache is sound.
    again = answers(core, requests)
    assert again.token_ids == expected
    assert {reason for reason, _ in again.ends.values()} == {"length"}
    assert any(num_cached_tokens for _, num_cached_tokens in again.started.values())


def test_a_core_whose_caches_are_lost_does_not_go_on(core, monkeypatch):
    monkeypatch.setattr(type(core.runner), "is_usable", False)
    Broken(monkeypatch, core.runner, "launch", 2)
    core.add_request(request("a", PROMPTS[1]))
    core.step()
    with pytest.raises(RuntimeError, match="a defect") as failure:
        core.step()
    with pytest.raises(RuntimeError, match="a defect"):
        core.recover(failure.value)
    ear = Ear()
    ear.hear(core.abort_all())
    assert ear.ends == {"a": ("abort", None)}


def test_a_failure_outside_of_any_step_is_not_blamed_on_the_last_one(core, monkeypatch):
    core.add_request(request("a", PROMPTS[1]))
    core.step()
    Broken(monkeypatch, core.scheduler, "schedule", 1)
    with pytest.raises(RuntimeError, match="a defect") as failure:
        core.step()
    with pytest.raises(RuntimeError, match="a defect"):
        core.recover(failure.value)


def test_a_runner_knows_whether_its_caches_are_there(tiny_model):
    runner, _ = tiny_model("llama").start_runner()
    assert runner.is_usable
    for array in runner._kv_pages:
        array.delete()
    assert not runner.is_usable
    runner.shutdown()


# Logits that are no numbers


@pytest.fixture
def poison(core):
    """(token id): from here on the model computes NaN where it reads this token; None: where it reads none."""
    runner, sound = core.runner, core.runner._weights
    index = list(runner._model._specs).index("embedding.weight")

    def poison(token_id):
        runner._weights = list(sound)
        if token_id is not None:
            runner._weights[index] = sound[index].at[token_id].set(np.nan)

    yield poison
    runner._weights = sound


def test_logits_that_are_no_numbers_end_their_own_request_and_no_other(core, poison):
    requests = [request(str(number), PROMPTS[number % 4], streams=number < 10) for number in range(20)]
    expected = answers(core, requests).token_ids
    core.reset_prefix_cache()
    token_id = expected["1"][6]  # The request reads it after seven tokens.
    poison(token_id)
    num_before = core.stats().num_unsound
    ear = answers(core, requests)
    core.scheduler.check_integrity()
    failed = {name for name, (reason, _) in ear.ends.items() if reason == "error"}
    assert "1" in failed
    assert len(failed) < 20
    for number in range(20):
        prompt, whole = PROMPTS[number % 4], expected[str(number)]
        has_read = token_id in [*prompt, *whole[:-1]]
        assert (str(number) in failed) == has_read
        num_sound = 0 if token_id in prompt else whole.index(token_id) + 1 if has_read else len(whole)
        assert ear.token_ids.get(str(number), []) == whole[:num_sound]
    assert all("are NaN or infinite; compare the model's files" in ear.ends[name][1] for name in failed)
    assert core.stats().num_unsound - num_before == len(failed)
    assert core.scheduler.stats().num_requests[RequestStatus.FINISHED_ERROR] >= len(failed)


def test_what_was_computed_from_nan_is_found_by_nobody_and_spoils_no_page(core, poison):
    spoiled = request("spoiled", [*PROMPTS[3], 7, *PROMPTS[0]])
    others = [request(str(number), [*spoiled.prompt_token_ids[:10], number, *PROMPTS[2]]) for number in range(20)]
    expected = answers(core, [spoiled, *others]).token_ids
    core.reset_prefix_cache()
    poison(7)
    assert answers(core, [spoiled]).ends["spoiled"][0] == "error"
    assert all(np.isnan(array).any() for array in core.runner._kv_pages), "there is to be NaN in free pages"
    assert core.scheduler.stats().num_cached_pages == 0
    poison(None)
    again = answers(core, [spoiled, *others])
    assert again.started["spoiled"][1] == 0
    assert again.token_ids == expected


def test_a_preempted_request_whose_last_step_gave_nan_ends_too(core, poison):
    [whole] = answers(core, [request("a", PROMPTS[1])]).token_ids.values()
    poison(whole[3])
    num_sound = whole.index(whole[3]) + 1
    core.add_request(request("a", PROMPTS[1]))
    ear = Ear()
    while core.has_unfinished_requests:
        ear.hear(core.step())
        core.reset_prefix_cache(force=True)  # It preempts all, and one step is in flight.
        core.scheduler.check_integrity()
    assert ear.ends["a"][0] == "error"
    assert ear.token_ids["a"] == whole[:num_sound]


# Outputs


def test_two_outputs_join_to_what_both_say():
    first, later = CoreOutput(1.0, started=[("a", 0.5, 0)]), CoreOutput(2.0, started=[("c", 1.5, 8)])
    first.add_tokens("a", [1])
    first.add_tokens("b", [2, 3], [TokenLogprobs(2, -1.0, []), TokenLogprobs(3, -1.0, [])])
    later.add_tokens("b", [4], [TokenLogprobs(4, -1.0, [])])
    later.add_tokens("c", [5])
    later.finished.append(("b", "length", None))
    joined = first.joined(later)
    assert joined.time == 1.0
    assert dict(joined.tokens_by_key()) == {"a": [1], "b": [2, 3, 4], "c": [5]}
    assert [token.token_id for token in joined.logprobs["b"]] == [2, 3, 4]
    assert joined.finished == [("b", "length", None)]
    assert joined.started == [("a", 0.5, 0), ("c", 1.5, 8)]
    assert joined.num_new_tokens == [1, 3, 1]
    assert not CoreOutput()
    assert all((first, later, joined))
