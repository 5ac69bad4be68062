"""What a core could tell of its tokens, turned to text, reasons and times."""

import pytest

from jaxllm import SamplingParams, TokenLogprobs
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.text.output_processor import OutputProcessor
from jaxllm.loading.sources import open_checkpoint

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return open_checkpoint(tiny_folder).tokenizer()


class Script:
    """A core whose requests' tokens are written beforehand: `step` tells the next of each, or what is said."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.outputs = OutputProcessor(tokenizer)
        self.tokens, self.stops, self.deltas = {}, {}, {}
        self.time = 0.0

    def add(self, name, text, *, prompt="p", **options):
        """A request that will be answered by `text` (or token ids)."""
        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        params = SamplingParams(temperature=0, **{"max_tokens": len(ids), **options})
        self.tokens[name], self.deltas[name] = list(ids), []
        self.stops[name] = {EOS, *params.stop_token_ids}
        self.outputs.add([name], name, prompt_token_ids=self.tokenizer.encode(prompt), params=params, arrival_time=0.0)

    def step(self, num_tokens=1):
        """Each unfinished request's next tokens, and the end of those that have no more, or a stop token."""
        output = CoreOutput(self.time)
        for name, ids in list(self.tokens.items()):
            new, self.tokens[name] = ids[:num_tokens], ids[num_tokens:]
            stop = next((number for number, id_ in enumerate(new, 1) if id_ in self.stops[name]), None)
            output.add_tokens(name, new[:stop])
            if stop is not None or not self.tokens[name]:
                output.finished.append((name, "length" if stop is None else "stop", None))
                del self.tokens[name]
        return self.take_in(output)

    def take_in(self, output):
        processed = self.outputs.process(output)
        for name, delta in (*processed.first, *processed.others):
            self.deltas[name].append(delta)
        for name in processed.stopped:
            del self.tokens[name]
        self.time += 1.0
        return processed.stopped

    def run(self, num_tokens=1):
        while self.tokens:
            self.step(num_tokens)
        assert self.outputs.keys == []

    def texts(self, name):
        return [delta.text for delta in self.deltas[name] if delta.text]

    def token_ids(self, name):
        return [token_id for delta in self.deltas[name] for token_id in delta.token_ids]


@pytest.fixture
def script(tokenizer):
    return Script(tokenizer)


def test_a_character_of_several_tokens_is_told_once_and_whole(script):
    script.add("a", "aé\U0001f40d!")
    script.run()
    assert script.texts("a") == ["a", "é", "\U0001f40d", "!"]
    assert len(script.token_ids("a")) == 8


def test_an_incomplete_character_at_the_end_is_a_replacement_character(script):
    script.add("a", script.tokenizer.encode("a\U0001f40d")[:-1])
    script.run()
    assert script.texts("a") == ["a", "\ufffd"]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 100])
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
        # Unless it is to be kept: then it is text like any other.
        ("one</s>two", {"include_stop_str_in_output": True}, "one", "stop", None),
        ("one</s>two", {"include_stop_str_in_output": True, "skip_special_tokens": False}, "one</s>", "stop", None),
        (
            "one</s>two",
            {"include_stop_str_in_output": True, "skip_special_tokens": False, "stop": "e<"},
            "one<",
            "stop",
            "e<",
        ),
        # Stop strings count from the tokens after min_tokens on, and those that end in them.
        ("one one", {"stop": "ne", "min_tokens": 3}, "one o", "stop", "ne"),
        ("one one", {"stop": "ne", "min_tokens": 2}, "one o", "stop", "ne"),
        ("one one", {"stop": "ne", "min_tokens": 1}, "o", "stop", "ne"),
        ("one one", {"stop": "ne", "min_tokens": 7}, "one one", "length", None),
    ],
)
def test_the_text_ends_where_the_request_does(script, text, options, expected, reason, stop_reason, num_tokens):
    """However many tokens come at once."""
    script.add("a", text, **options)
    script.run(num_tokens)
    last = script.deltas["a"][-1]
    assert "".join(script.texts("a")) == expected
    assert (last.finish_reason, last.stop_reason) == (reason, stop_reason)
    assert [delta.finish_reason for delta in script.deltas["a"][:-1]] == [None] * (len(script.deltas["a"]) - 1)
    assert last.metrics.num_output_tokens == len(script.token_ids("a"))


@pytest.mark.parametrize("num_tokens", [1, 3, 100])
def test_a_stop_string_ends_the_tokens_with_the_one_that_completes_it(script, num_tokens):
    script.add("a", "one two three", stop=["two t", "xyz"])
    script.add("b", "x" * 40)
    while "a" in script.tokens:
        stopped = script.step(num_tokens)
    assert stopped == (["a"] if num_tokens < 100 else [])  # else the core has ended it itself
    assert "".join(script.texts("a")) == "one "
    assert script.token_ids("a") == script.tokenizer.encode("one two t")
    script.run(num_tokens)
    assert "".join(script.texts("b")) == "x" * 40


def test_what_comes_after_the_end_is_dropped(script):
    """The core runs on for a step or two before it hears of a stop string."""
    script.add("a", "one two", stop="ne")
    for _ in range(3):
        script.step()
    late = CoreOutput(9.0, keys=["a"], token_ids=[5], finished=[("a", "length", None)])
    processed = script.outputs.process(late)
    assert [*processed.first, *processed.others, *processed.stopped] == []


def test_logprobs_go_with_their_tokens(script):
    script.add("a", "one two", stop="ne", logprobs=0)
    ids = script.tokenizer.encode("one two")
    output = CoreOutput(1.0)
    output.add_tokens("a", ids, [TokenLogprobs(id_, -1.0, []) for id_ in ids])
    script.take_in(output)
    [delta] = script.deltas["a"]
    assert delta.token_ids == [token.token_id for token in delta.logprobs] == ids[:3]


def test_an_end_without_tokens_tells_what_was_held_back(script):
    script.add("a", "ab\U0001f40d")
    script.add("b", "the en", stop="end", max_tokens=99)
    for _ in range(6):
        script.step()
    script.take_in(CoreOutput(9.0, finished=[("a", "abort", None), ("b", "error", "the device is gone")]))
    assert "".join(script.texts("a")) == "ab\U0001f40d"
    assert "".join(script.texts("b")) == "the en"


def test_an_aborted_request_gives_the_text_that_was_held_back(script):
    script.add("a", "ab\U0001f40d", stop=["never"])
    for _ in range(4):
        script.step()
    assert script.texts("a") == ["a", "b"]
    script.take_in(CoreOutput(9.0, finished=[("a", "abort", None)]))
    last = script.deltas["a"][-1]
    assert (last.text, last.token_ids, last.finish_reason) == ("\ufffd", [], "abort")
    assert script.outputs.keys == []


def test_an_error_is_told(script):
    script.add("a", "abc")
    _, delta = script.outputs.finish("a", "error", "the device is gone", now=3.0)
    assert (delta.finish_reason, delta.error, delta.metrics.finished_time) == ("error", "the device is gone", 3.0)
    assert script.outputs.keys == []


def test_times_are_taken_when_things_first_happen(script):
    script.add("a", "abc")
    script.take_in(CoreOutput(1.0, started=[("a", 0.5, 16)]))
    script.run()
    metrics = script.deltas["a"][-1].metrics
    assert metrics.arrival_time == 0.0
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (0.5, 1.0, 3.0)
    assert (metrics.num_output_tokens, metrics.num_cached_tokens) == (3, 16)


def test_who_waits_most_comes_first(script):
    """A first token before all others, and those that end before those that go on."""
    script.add("goes on", "one two three four")
    script.add("ends", "one two")
    script.step()
    output = CoreOutput(
        5.0, keys=["goes on", "ends"], token_ids=[script.tokens["goes on"][0], script.tokens["ends"][0]]
    )
    output.finished.append(("ends", "length", None))
    script.add("begins now", "one two")
    output.add_tokens("begins now", [script.tokens["begins now"][0]])
    processed = script.outputs.process(output)
    assert [name for name, _ in processed.first] == ["begins now"]
    assert [name for name, _ in processed.others] == ["ends", "goes on"]
