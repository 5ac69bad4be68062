"""Tokens that a device could have sampled, through the scheduler, to text, reasons and times."""

import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.loading.sources import open_checkpoint
from jaxllm.scheduler import Request, RequestStatus, Scheduler, SchedulerConfig

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return open_checkpoint(tiny_folder).tokenizer()


class Script:
    """A scheduler and an output processor, for which each request's tokens are written beforehand."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, page_size=8, num_pages=40)
        )
        self.outputs = OutputProcessor(tokenizer)
        self.tokens = {}
        self.heard = {}
        self.finished = {}

    def add(self, name, text, *, prompt="p", streamed=False, **options):
        """A request that will be answered by `text` (or token ids)."""
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        params = SamplingParams(temperature=0, **{"max_tokens": len(ids), **options})
        request = Request(
            name,
            self.tokenizer.encode(prompt),
            max_tokens=params.max_tokens,
            stop_token_ids=(*params.stop_token_ids, EOS),
        )
        self.tokens[name], self.heard[name] = list(ids), []
        self.scheduler.add_request(request)
        on_text = self.heard[name].append if streamed else None
        self.outputs.add(request, prompt=prompt, params=params, on_text=on_text)

    def step(self):
        plan = self.scheduler.schedule()
        requests = self.scheduler.table.requests_of(plan.rows)
        self.outputs.note_start(requests)
        sampled = np.array([self.tokens[request.request_id].pop(0) for request in requests], np.int32)
        finished, stopped = self.outputs.process(self.scheduler.update(plan, sampled))
        for output in stopped:
            self.scheduler.finish_request(output.request_id, RequestStatus.FINISHED_STOP)
        self.finished |= {output.request_id: output for output in finished + stopped}

    def run(self):
        while self.scheduler.has_unfinished_requests:
            self.step()
        assert self.outputs.request_ids == []
        return {name: output.outputs[0] for name, output in self.finished.items()}


@pytest.fixture
def script(tokenizer):
    return Script(tokenizer)


def test_a_character_of_several_tokens_is_heard_once_and_whole(script):
    script.add("a", "aé\U0001f40d!", streamed=True)
    script.add("b", "aé\U0001f40d!")
    completions = script.run()
    assert script.heard["a"] == ["a", "é", "\U0001f40d", "!"]
    assert completions["a"] == completions["b"]
    assert completions["a"].text == "aé\U0001f40d!"
    assert len(completions["a"].token_ids) == 8


def test_an_incomplete_character_at_the_end_is_a_replacement_character(script):
    ids = script.tokenizer.encode("a\U0001f40d")[:-1]
    script.add("a", ids, streamed=True)
    script.add("b", ids)
    completions = script.run()
    assert script.heard["a"] == ["a", "\ufffd"]
    assert completions["a"].text == completions["b"].text == "a\ufffd"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "options", "expected", "reason", "stop_reason"),
    [
        ("one two three", {}, "one two three", "length", None),
        ("one two three", {"stop": " t"}, "one", "stop", " t"),
        ("one two three", {"stop": " t", "include_stop_str_in_output": True}, "one t", "stop", " t"),
        # The stop string and the last token that is allowed come together.
        ("one two", {"stop": "wo"}, "one t", "stop", "wo"),
        # The beginning of a stop string, and the end.
        ("one two", {"stop": "wow"}, "one two", "length", None),
        ("one</s>two", {}, "one", "stop", None),
        ("one</s>two", {"stop": "ne!"}, "one", "stop", None),
        ("one</s>two", {"stop_token_ids": [EOS]}, "one", "stop", EOS),
        ("on<s>e", {"skip_special_tokens": True}, "one", "length", None),
        ("on<s>e", {"skip_special_tokens": False}, "on<s>e", "length", None),
        # The text of the token that ended the output is not looked at.
        ("one</s>two", {"stop": "</s>", "skip_special_tokens": False}, "one", "stop", None),
    ],
)
def test_the_text_ends_where_the_request_does(script, text, options, expected, reason, stop_reason, streamed):
    script.add("a", text, streamed=streamed, **options)
    completion = script.run()["a"]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (expected, reason, stop_reason)
    if streamed:
        assert "".join(script.heard["a"]) == expected
        assert all(script.heard["a"])


def test_a_stop_string_may_begin_in_one_token_and_end_in_a_later_one(script):
    script.add("a", "one two three", streamed=True, stop=["two t", "xyz"])
    script.add("b", "x" * 40)
    completions = script.run()
    assert script.heard["a"] == ["o", "n", "e", " "]
    assert completions["a"].token_ids == script.tokenizer.encode("one two t")
    assert completions["b"].text == "x" * 40


@pytest.mark.parametrize(("streamed", "heard"), [(False, []), (True, ["a", "b"])])
def test_an_aborted_request_gives_what_it_has(script, streamed, heard):
    script.add("a", "ab\U0001f40d", streamed=streamed, stop=["never"] if streamed else None)
    script.add("waits", "abc")
    for _ in range(4):
        script.step()
    assert script.heard["a"] == heard
    assert script.scheduler.abort_request("a")
    output = script.outputs.finish("a")
    assert output.outputs[0].text == "ab\ufffd"
    assert output.outputs[0].finish_reason == "abort"
    assert "".join(script.heard["a"]) == ("ab\ufffd" if streamed else "")
    assert "a" not in script.outputs.request_ids


def test_what_was_held_back_for_a_stop_string_is_heard_at_the_end(script):
    script.add("a", "the en", streamed=True, stop="end")
    assert script.run()["a"].text == "the en"
    assert script.heard["a"][-1] == "en"


def test_times_are_taken_when_things_first_happen(script, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    script.add("a", "abc")
    for _ in range(3):
        script.step()
    metrics = script.finished["a"].metrics
    assert metrics.arrival_time == 0.0  # As the request says.
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (0, 1, 3)
    assert metrics.num_output_tokens == 3


def test_a_listener_that_raises_loses_nobody(script, monkeypatch):
    """Neither who ends in this step nor the others: what all have so far can still be asked for."""
    script.add("stopped", "one two", stop="ne")
    script.add("deaf", "abc", streamed=True)
    script.step()
    script.step()

    def raise_error(text):
        raise RuntimeError("deaf")

    script.outputs._records["deaf"].on_text = raise_error
    with pytest.raises(RuntimeError, match="deaf"):
        script.step()
    assert script.outputs.request_ids == ["stopped", "deaf"]
