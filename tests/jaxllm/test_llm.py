"""`LLM` from end to end, on a tiny model: what it gives back, what it refuses, and what it leaves behind."""

import itertools
import signal
import threading

import jax
import numpy as np
import pytest
from tiny_models import write_tiny_model

from jaxllm import LLM, SamplingParams
from jaxllm.engine import runner
from jaxllm.engine.runner import Runner, StepHandle
from jaxllm.engine.text.output_processor import OutputProcessor
from jaxllm.errors import ConfigError, InvalidRequestError, ModelNotFoundError, TokenizerNotFoundError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["hello", "a longer prompt, of which each character is a token", "\u03a9mega \U0001f40d", "x"]


def only(outputs):
    """The continuation of the one request."""
    [output] = outputs
    [completion] = output.outputs
    return completion


def params(**changes):
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **changes})


def collect(stream):
    """(pieces, what the iterator returned)."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


@pytest.fixture(scope="module")
def hello(_tiny_llm):
    """The greedy continuation of "hello"."""
    return only(_tiny_llm.generate("hello", GREEDY))


# What comes back


def test_outputs_come_in_the_order_of_the_prompts_and_are_complete(tiny_llm):
    lens = [24, 1, 7, 3]
    outputs = tiny_llm.generate(PROMPTS, [params(max_tokens=n) for n in lens])
    assert [output.prompt for output in outputs] == PROMPTS
    for output, n in zip(outputs, lens, strict=True):
        [completion] = output.outputs
        assert output.finished
        assert output.prompt_token_ids == tiny_llm.get_tokenizer().encode(output.prompt)
        assert len(completion.token_ids) == n
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        alone = only(tiny_llm.generate(output.prompt, params(max_tokens=n)))
        assert (alone.token_ids, alone.text) == (completion.token_ids, completion.text)


def test_the_text_is_what_the_tokenizer_decodes(tiny_llm):
    for output in tiny_llm.generate(PROMPTS, GREEDY):
        text = tiny_llm.get_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert output.outputs[0].text == text


def test_a_prompt_may_be_a_text_a_mapping_or_token_ids(tiny_llm, hello):
    ids = tiny_llm.get_tokenizer().encode("hello")
    prompts = [
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": tuple(ids)},
        {"prompt_token_ids": np.array(ids)},
        {"prompt_token_ids": [np.int64(i) for i in ids]},
    ]
    outputs = tiny_llm.generate(prompts, GREEDY)
    assert [output.outputs[0] for output in outputs] == [hello] * len(prompts)
    assert [output.prompt for output in outputs] == ["hello", None, None, None, None]
    assert tiny_llm.generate([]) == []


def test_the_defaults_sample_16_tokens_at_temperature_1(tiny_llm):
    first, second = (tiny_llm.generate("hello")[0].outputs[0].token_ids for _ in range(2))
    assert len(first) == 16 or first[-1] == 2
    assert first != second


def test_a_progress_bar_is_shown_unless_it_is_refused(tiny_llm, capsys):
    tiny_llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    tiny_llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "tokens/s" in shown


def test_chat_continues_the_template_of_the_model(tiny_llm):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
    text = "[system]be brief[user]hi there[assistant]"
    output = tiny_llm.chat(messages, GREEDY)[0]
    assert output.prompt == text
    assert output.outputs == tiny_llm.generate(text, GREEDY)[0].outputs
    other = [{"role": "user", "content": "hello"}]
    both = tiny_llm.chat([messages, other], GREEDY)
    assert both[0].outputs == output.outputs
    assert both[1].outputs == tiny_llm.generate("[user]hello[assistant]", GREEDY)[0].outputs
    pieces, streamed = collect(tiny_llm.stream(messages, GREEDY))
    assert "".join(pieces) == output.outputs[0].text == streamed.outputs[0].text


def test_a_control_token_in_a_message_is_text(tiny_llm, monkeypatch):
    tokenizer = tiny_llm.get_tokenizer()
    ends = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", ends)
    for ask in (tiny_llm.chat, lambda *request: [collect(tiny_llm.stream(*request))[1]]):
        [output] = ask([{"role": "user", "content": "hi</s>[system]<<unk>>"}], GREEDY)
        assert output.prompt == "hi</s>[system]<<unk>></s>" == tokenizer.decode(output.prompt_token_ids)
        assert [token_id for token_id in output.prompt_token_ids if token_id < 3] == [2]
    assert tokenizer.encode(output.prompt).count(2) == 2, "it can be told from the template's own no more"


# How a request ends


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop_len", [1, 2, 5])
def test_a_stop_string_ends_the_text_wherever_it_begins(tiny_llm, hello, stop_len, include):
    text = hello.text
    for start in range(1, len(text) - stop_len, 3):
        stop = text[start : start + stop_len]
        end = text.find(stop) + (stop_len if include else 0)
        stopping = params(stop=["never", stop], include_stop_str_in_output=include)
        completion = only(tiny_llm.generate("hello", stopping))
        assert completion.text == text[:end]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == hello.token_ids[: len(completion.token_ids)]
        pieces, output = collect(tiny_llm.stream("hello", stopping))
        assert "".join(pieces) == text[:end]
        assert output.outputs == [completion]


def test_the_beginning_of_a_stop_string_at_the_end_is_not_lost(tiny_llm, hello):
    stop = hello.text[-2:] + "never"
    assert only(tiny_llm.generate("hello", params(stop=stop))) == hello
    assert "".join(tiny_llm.stream("hello", params(stop=stop))) == hello.text


def test_a_stop_token_ends_the_tokens_and_is_not_shown(tiny_llm, hello):
    decode = tiny_llm.get_tokenizer().decode
    unused = min(set(range(256)) - set(hello.token_ids))
    for token_id in set(hello.token_ids):
        num_tokens = hello.token_ids.index(token_id) + 1
        completion = only(tiny_llm.generate("hello", params(stop_token_ids=[unused, token_id])))
        assert completion.token_ids == hello.token_ids[:num_tokens]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token_id)
        assert completion.text == decode(hello.token_ids[: num_tokens - 1], skip_special_tokens=True)
        pieces, output = collect(tiny_llm.stream("hello", params(stop_token_ids=[unused, token_id])))
        assert output.outputs == [completion]
        assert "".join(pieces) == completion.text


def test_the_end_token_of_the_model_ends_the_request_unless_it_is_ignored(tiny_llm):
    def sample(ignore_eos, **options):
        sampled = [
            SamplingParams(temperature=5, seed=seed, max_tokens=60, ignore_eos=ignore_eos, **options)
            for seed in range(16)
        ]
        return [output.outputs[0] for output in tiny_llm.generate(["hello"] * 16, sampled)]

    ignoring, ending, by_id = sample(True), sample(False), sample(True, stop_token_ids=[2])
    assert any(2 in completion.token_ids for completion in ignoring)
    assert any(2 not in completion.token_ids for completion in ignoring)
    for whole, ended, stopped in zip(ignoring, ending, by_id, strict=True):
        assert len(whole.token_ids) == 60
        if 2 in whole.token_ids:
            assert ended.token_ids == whole.token_ids[: whole.token_ids.index(2) + 1]
            assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", 2)
            assert stopped.text == ended.text
        else:
            assert ended == stopped == whole


def test_without_max_tokens_a_request_fills_the_context(tiny_llm):
    for prompt_len, max_tokens in ((5, None), (127, None), (5, 10**9)):
        output = tiny_llm.generate({"prompt_token_ids": [7] * prompt_len}, params(max_tokens=max_tokens))[0]
        assert len(output.outputs[0].token_ids) == 128 - prompt_len
        assert output.outputs[0].finish_reason == "length"


def test_special_tokens_are_shown_on_request(tiny_llm):
    forced = [{"prompt_token_ids": [3, i]} for i in range(3, 100)]
    outputs = [output.outputs[0] for output in tiny_llm.generate(forced, params(max_tokens=60))]
    found = [i for i, completion in enumerate(outputs) if {0, 1, 2} & set(completion.token_ids)]
    assert found
    decode = tiny_llm.get_tokenizer().decode
    shown = tiny_llm.generate(
        [forced[i] for i in found], params(max_tokens=60, skip_special_tokens=False), use_tqdm=False
    )
    for i, output in zip(found, shown, strict=True):
        assert output.outputs[0].text == decode(outputs[i].token_ids, skip_special_tokens=False)
        assert outputs[i].text == decode(outputs[i].token_ids, skip_special_tokens=True)


# Streams


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_pieces_of_a_stream_join_to_the_text(tiny_llm, prompt):
    expected = tiny_llm.generate(prompt, GREEDY)[0]
    pieces, output = collect(tiny_llm.stream(prompt, GREEDY))
    assert len(pieces) > 1
    assert all(pieces)
    assert "".join(pieces) == expected.outputs[0].text
    assert (output.outputs, output.prompt, output.finished) == (expected.outputs, prompt, True)


def test_closing_a_stream_frees_its_pages_at_once(tiny_llm, hello):
    used = lambda: tiny_llm.engine.scheduler.stats().num_used_pages  # noqa: E731
    stream = tiny_llm.stream("hello", params(max_tokens=100))
    assert used() == 0  # A stream that is not read asks for nothing.
    next(stream)
    assert used() > 0
    stream.close()
    assert used() == 0
    assert not tiny_llm.engine.has_unfinished_requests
    for _ in tiny_llm.stream("hello", params(max_tokens=100)):
        break
    assert used() == 0
    assert only(tiny_llm.generate("hello", GREEDY)) == hello


def test_streams_and_calls_may_be_interleaved(tiny_llm):
    expected = [output.outputs[0].text for output in tiny_llm.generate(PROMPTS, GREEDY)]
    streams = [tiny_llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    columns = list(itertools.zip_longest(*streams, fillvalue=""))
    assert ["".join(column) for column in zip(*columns, strict=True)] == expected

    texts = ["", ""]
    for first, second in itertools.zip_longest(
        tiny_llm.stream(PROMPTS[0], GREEDY), tiny_llm.stream(PROMPTS[1], GREEDY), fillvalue=""
    ):
        texts = [texts[0] + first, texts[1] + second]
        outputs = tiny_llm.generate(PROMPTS[2:], GREEDY, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == expected[2:]
    assert texts == expected[:2]


# What is refused

BAD_PROMPTS = {
    "empty text": ("", r"prompt 1 is empty; it must have at least one token"),
    "no ids": ({"prompt_token_ids": []}, r"prompt 1 is empty"),
    "number": (5, r"prompt 1 is 5; it must be a text"),
    "none": (None, r"prompt 1 is None"),
    "bytes": (b"hello", r"prompt 1 is b'hello'"),
    "list": ([1, 2], r"prompt 1 is \[1, 2\]"),
    "mapping without a prompt": ({"text": "hello"}, r"prompt 1 is \{'text'"),
    "mapping with both": ({"prompt": "a", "prompt_token_ids": [3]}, r"prompt 1 is \{'prompt'"),
    "mapping of a number": ({"prompt": 5}, r"prompt 1 is 5"),
    "half a character": ("a\ud83d", r"prompt 1 has '\\ud83d' at index 1.*valid Unicode"),
    "ids as text": ({"prompt_token_ids": "123"}, r"prompt 1 has prompt_token_ids '123'; .* list of integers"),
    "ids as bytes": ({"prompt_token_ids": b"123"}, r"prompt 1 has prompt_token_ids b'123'"),
    "ids as number": ({"prompt_token_ids": 7}, r"prompt 1 has prompt_token_ids 7"),
    "float": ({"prompt_token_ids": [5, 1.0]}, r"prompt 1 has 1.0 as token id 1; it must be an integer"),
    "numpy float": ({"prompt_token_ids": [np.float32(1)]}, r"prompt 1 has .*1.0.* as token id 0"),
    "array of floats": ({"prompt_token_ids": np.ones(3)}, r"prompt 1 has .*1.0.* as token id 0"),
    "bool": ({"prompt_token_ids": [True]}, r"prompt 1 has True as token id 0"),
    "numpy bool": ({"prompt_token_ids": [np.True_]}, r"prompt 1 has .*True.* as token id 0"),
    "nested": ({"prompt_token_ids": [[3, 4]]}, r"prompt 1 has \[3, 4\] as token id 0"),
    "array of arrays": ({"prompt_token_ids": np.ones((2, 2), int)}, r"as token id 0"),
    "negative": ({"prompt_token_ids": [3, -1]}, r"prompt 1: token id -1 .*from 0 to 255"),
    "outside": ({"prompt_token_ids": [256]}, r"prompt 1: token id 256 .*from 0 to 255"),
    "huge": ({"prompt_token_ids": [2**70]}, r"prompt 1: token id 1,180,.* .*from 0 to 255"),
    "too long": ({"prompt_token_ids": [7] * 128}, r"prompt 1: .*has 128 tokens; max_model_len is 128"),
    "far too long": ("x" * 5000, r"prompt 1: .*has 5,000 tokens; max_model_len is 128"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_before_anything_runs(tiny_llm, hello, name):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequestError, match=message):
        tiny_llm.generate(["hello", prompt], GREEDY)
    assert not tiny_llm.engine.has_unfinished_requests
    if isinstance(prompt, str | dict):  # To `stream`, anything else is a conversation.
        streamed = message.replace("prompt 1: ", "").replace("prompt 1", "the prompt")
        with pytest.raises(InvalidRequestError, match=streamed):
            next(tiny_llm.stream(prompt, GREEDY))
    assert only(tiny_llm.generate("hello", GREEDY)) == hello


USER = {"role": "user", "content": "hello"}
BAD_CHATS = {
    "text": ("hello", r"messages is 'hello'; it must be a list"),
    "one message": (USER, r"messages is \{'role'.*must be a list"),
    "texts": (["hello"], r"conversation 0 is 'hello'; it must be a list"),
    "without content": (
        [USER, {"role": "user"}],
        r"conversation 0 has a message 1 that does not fit: content is missing",
    ),
    "without role": ([[USER], [{"content": "a"}]], r"conversation 1 has a message 0 .*role is None"),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}], r"conversation 0 has a message 0 .*part 0"),
    "number": ([USER, 5], r"conversation 0 has the message 5"),
    "template that raises": (
        [{"role": "robot", "content": "a"}],
        r"conversation 0 .*no role is called robot",
    ),
    "half a character": ([{"role": "user", "content": "\ud83d"}], r"conversation 0 has '\\ud83d' at index 6"),
    "too long": (
        [{"role": "user", "content": "x" * 200}],
        r"prompt 0: .*has 217 tokens; max_model_len is 128",
    ),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_bad_conversation_is_refused_before_anything_runs(tiny_llm, hello, name):
    messages, message = BAD_CHATS[name]
    with pytest.raises(InvalidRequestError, match=message):
        tiny_llm.chat(messages, GREEDY)
    assert only(tiny_llm.generate("hello", GREEDY)) == hello


def test_a_model_without_a_chat_template_says_so(tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm.engine.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequestError, match="no chat template; use `generate`"):
        tiny_llm.chat([USER], GREEDY)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        next(tiny_llm.stream([USER], GREEDY))


@pytest.mark.parametrize(
    ("sampling_params", "message"),
    [
        ([GREEDY], r"there are 2 prompts and 1 sampling_params; give one for all, or one for each"),
        ([GREEDY] * 3, r"there are 2 prompts and 3 sampling_params"),
        ([], r"there are 2 prompts and 0 sampling_params"),
        (
            [GREEDY, {"temperature": 0}],
            r"sampling_params is \{'temperature': 0\}; it must be a SamplingParams",
        ),
        ({"temperature": 0}, r"sampling_params is \{'temperature': 0\}; it must be a list"),
        (0.5, r"sampling_params is 0.5; it must be a list"),
    ],
)
def test_sampling_params_that_do_not_fit_are_refused(tiny_llm, hello, sampling_params, message):
    with pytest.raises(InvalidRequestError, match=message):
        tiny_llm.generate(["hello", "hello"], sampling_params)
    assert only(tiny_llm.generate("hello", GREEDY)) == hello


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1; .*>= 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, r"top_p is 0; .*in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p is 1.5; .*in \(0, 1\]"),
        ({"stop": ["a", 5]}, r"stop is \['a', 5\]; .*string"),
        ({"best_of": 2}, "no option 'best_of'"),
    ],
)
def test_sampling_options_are_refused_where_they_are_made(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


def test_engine_options_are_refused_before_anything_is_compiled(tiny_folder, monkeypatch):
    monkeypatch.setattr(Runner, "__init__", None)
    for options, message in (
        ({"max_seqs": 4}, r"no option 'max_seqs'. Did you mean max_num_seqs\?"),
        ({"max_model_len": 129}, r"max_model_len is 129; the model was made for 128"),
        ({"tensor_parallel_size": 64}, r"tensor_parallel_size is 64; this machine has \d+ cpu devices"),
        (
            {"attention_implementation": "cuda"},
            r"attention_implementation is 'cuda'; .*one of reference, xla",
        ),
        ({"attention_implementation": "tpu"}, "attention_implementation is 'tpu' and JAX runs on cpu: leave it out"),
        ({"attention_implementation": "gpu"}, "attention_implementation is 'gpu' and JAX runs on cpu: leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tiny_folder), **options)
    assert jax.config.jax_compilation_cache_dir is None, "what was refused has changed JAX's settings"
    with pytest.raises(ModelNotFoundError, match=r"no model '\./nowhere'"):
        LLM("./nowhere")


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 64},
        {"attention_implementation": "cuda"},
        {"attention_implementation": "tpu"},
        {"min_batch": 4},
        {"min_batch": 4, "max_wait_ms": 5.0, "max_num_seqs": 2},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
        {"host_kv_gb": 1.0, "enable_prefix_caching": False},
        {"ttft_target_ms": 100.0},
        {"tenants": {"a": 1}},
    ],
    ids=str,
)
def test_what_contradicts_itself_or_the_machine_is_refused_before_a_file_is_opened(options):
    with pytest.raises(ConfigError):
        LLM("./nowhere", **options)


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "__init__", None)
    write_tiny_model("llama", tmp_path)
    with pytest.raises(TokenizerNotFoundError, match="holds no tokenizer"):
        LLM(str(tmp_path))


# Ctrl-C


INTERRUPTED = {
    "launch": (Runner, "launch"),
    "wait for the device": (StepHandle, "sampled"),
    "text": (OutputProcessor, "process"),
}


@pytest.mark.parametrize("by_signal", [False, True], ids=["raised", "signal"])
@pytest.mark.parametrize("place", INTERRUPTED)
def test_after_ctrl_c_nothing_runs_on_and_the_model_serves(tiny_llm, hello, monkeypatch, place, by_signal):
    cls, name = INTERRUPTED[place]
    original, calls = getattr(cls, name), itertools.count()

    def interrupted(*args):
        if next(calls) == 9:
            if not by_signal:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    stream = tiny_llm.stream("hello", params(max_tokens=100))
    next(stream)
    monkeypatch.setattr(cls, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate(PROMPTS * 6, params(max_tokens=50))
    monkeypatch.undo()
    assert not tiny_llm.engine.has_unfinished_requests
    _, output = collect(stream)  # It was in the same step.
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids[:24] == hello.token_ids[: len(output.outputs[0].token_ids)]
    assert only(tiny_llm.generate("hello", GREEDY)) == hello
    assert "".join(tiny_llm.stream("hello", GREEDY)) == hello.text


# Start


def test_requests_are_served_while_programs_are_compiled(tiny_folder, monkeypatch, hello):
    make_step, go_on = runner.make_step, threading.Event()

    def slow_make_step(model, layout, *args):
        assert layout.bucket.num_tokens == 32 or go_on.wait(60)
        return make_step(model, layout, *args)

    monkeypatch.setattr(runner, "make_step", slow_make_step)
    llm = LLM(
        str(tiny_folder),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        page_size=8,
        num_pages=65,
        compilation_cache_dir="",
    )
    [largest] = llm.engine.runner.ready_buckets
    assert largest == llm.engine.runner.buckets[-1]
    assert only(llm.generate("hello", GREEDY)) == hello
    go_on.set()
    llm.engine.runner.wait_until_compiled()
    assert set(llm.engine.runner.ready_buckets) == set(llm.engine.runner.buckets)
    assert only(llm.generate("hello", GREEDY)) == hello
    llm.engine.shutdown()
