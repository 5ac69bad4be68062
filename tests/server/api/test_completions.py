"""/v1/completions: its fields, and what is refused."""

import json

import httpx
import pytest

from jaxllm import TokenLogprobs
from jaxllm.server.api.protocol.logprobs import CompletionLogprobsWriter, token_namer

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


def post(server, **body) -> httpx.Response:
    content = json.dumps({"model": server.app.state.server.model_names[0]} | body)  # httpx encodes no half characters
    return httpx.post(server.url + PATH, content=content, headers=JSON, timeout=30)


def answer(server, **body) -> dict:
    response = post(server, **body)
    assert response.status_code == 200, response.text
    return response.json()


def texts(server, **body) -> list[str]:
    return [choice["text"] for choice in answer(server, **body)["choices"]]


def error(server, **body) -> dict:
    response = post(server, **body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_the_whole_answer(stub_server):
    whole = answer(stub_server, prompt="abc", max_tokens=4)
    assert whole.pop("id").startswith("cmpl-")
    assert whole.pop("created") > 1.7e9
    choice = {"index": 0, "text": "abca", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert whole.pop("usage") == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert whole == {"object": "text_completion", "model": "stub", "choices": [choice]}


def test_sixteen_tokens_are_the_default_or_what_the_context_has_left(stub_server):
    assert len(texts(stub_server, prompt="a")[0]) == 16
    assert len(texts(stub_server, prompt="a", max_tokens=None)[0]) == 16
    assert len(texts(stub_server, prompt="a" * 2043)[0]) == 5
    message = error(stub_server, prompt="a" * 2043, max_tokens=16)["message"]
    assert "2,043 tokens and max_tokens is 16; the context holds 2,048" in message


def test_the_prompt_in_its_four_forms(stub_server):
    ids = [[67, 68], [69]]
    options = {"max_tokens": 3}
    assert texts(stub_server, prompt="ab", **options) == ["aba"]
    assert texts(stub_server, prompt=["ab", "c"], **options) == ["aba", "ccc"]
    assert texts(stub_server, prompt=ids[0], **options) == ["aba"]
    assert texts(stub_server, prompt=ids, **options) == ["aba", "ccc"]


def test_choices_of_several_prompts_are_in_order(stub_server):
    whole = answer(stub_server, prompt=["ab", "!say:x"], n=2, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(["ab", "ab", "x", "x"]))
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (8, 8)


def test_echo_puts_the_prompt_first(stub_server):
    assert texts(stub_server, prompt=["ab", "é"], max_tokens=2, echo=True) == ["abab", "éé"]
    assert texts(stub_server, prompt=[67, 68], max_tokens=2, echo=True) == ["abab"]
    assert "echo and logprobs" in error(stub_server, prompt="ab", echo=True, logprobs=0)["message"]


def test_stop_texts_over_the_border_of_tokens(stub_server):
    whole = answer(stub_server, prompt="abcdef", max_tokens=50, stop=["zz", "cde"])
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cde")
    assert texts(stub_server, prompt="abcdef", stop="cde", include_stop_str_in_output=True) == ["abcde"]


def test_stop_tokens_and_the_least_number_of_tokens(stub_server):
    choice = answer(stub_server, prompt="abcdef", stop_token_ids=[69])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", 69)
    assert texts(stub_server, prompt="abcdef", stop_token_ids=[69], min_tokens=4) == ["abcdefab"]
    assert texts(stub_server, prompt="!say:ab") == ["ab"]
    assert texts(stub_server, prompt="!say:ab", ignore_eos=True, max_tokens=5) == ["abab"]
    shown = {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 5}
    assert texts(stub_server, prompt="!say:ab", **shown) == ["ab</s>ab"]
    kept = {"include_stop_str_in_output": True}
    assert texts(stub_server, prompt="abcdef", stop_token_ids=[69], **kept) == ["abc"]
    assert texts(stub_server, prompt="!say:ab", **kept) == ["ab"]
    assert texts(stub_server, prompt="!say:ab", skip_special_tokens=False, **kept) == ["ab</s>"]


def test_log_probabilities_in_the_old_shape(stub_server):
    logprobs = answer(stub_server, prompt="a€", max_tokens=5, logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "a"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -0.5}
    two = answer(stub_server, prompt="a", max_tokens=1, logprobs=2)["choices"][0]["logprobs"]
    assert two["top_logprobs"] == [{"a": -0.5, "b": -1.5}]
    none = answer(stub_server, prompt="a", max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
    assert (none["tokens"], none["top_logprobs"]) == (["a"], [{"a": -0.5}])
    options = {"max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    as_ids = answer(stub_server, prompt="a", **options)["choices"][0]["logprobs"]
    name = f"token_id:{ord('a') - 30}"
    assert (as_ids["tokens"], as_ids["top_logprobs"]) == ([name], [{name: -0.5}])


def test_no_token_is_lost_among_the_most_likely_when_two_have_one_text():
    texts = {7: "a", 8: "a", 9: "a", 10: "\ufffd", 11: "\ufffd"}
    data = {token_id: text.encode() for token_id, text in texts.items()} | {10: b"\xe2", 11: b"\x82"}
    name_of = token_namer(lambda token_id: (texts[token_id], data[token_id]))
    top = [(token_id, -float(token_id)) for token_id in texts]
    writer = CompletionLogprobsWriter(name_of, 5, lambda token_id: (texts[token_id], 0))
    (shown,) = writer.write([TokenLogprobs(8, -8.0, top)])["top_logprobs"]
    assert shown == {"a": -8.0, "token_id:7": -7.0, "token_id:9": -9.0, r"bytes:\xe2": -10.0, r"bytes:\x82": -11.0}


@pytest.mark.parametrize("options", [{}, {"skip_special_tokens": False}, {"n": 2}, {"stream": True, "n": 2}])
def test_an_offset_is_where_the_text_of_its_token_begins(stub_server, options):
    """Of hidden special tokens, split characters, bytes that form none, and of every choice."""
    bytes_of = {token_id: stub_server.llm.token_text(token_id)[1] for token_id in range(256)}
    id_of = {data: token_id for token_id, data in bytes_of.items() if len(data) == 1}
    euro, broken = ([id_of[bytes([byte])] for byte in data] for data in (b"\xe2\x82\xac", b"\xe2\x82"))
    prompts = [[1, *euro, 0, 69, 2, *broken, 70, 2, 71], [*broken, 1, *broken, 72]]
    body = {"prompt": prompts, "max_tokens": 40, "logprobs": 0, "ignore_eos": True} | options
    choices = {}
    if options.get("stream"):
        for line in post(stub_server, **body).text.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            choices.setdefault(choice["index"], []).append(choice)
    else:
        choices = {choice["index"]: [choice] for choice in answer(stub_server, **body)["choices"]}
    assert len(choices) == 2 * options.get("n", 1)
    for index, chunks in choices.items():
        text = "".join(chunk["text"] for chunk in chunks)
        offsets = [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]
        prompt = prompts[index // options.get("n", 1)]
        token_ids = (prompt * 40)[:40]
        assert len(offsets) == 40
        for token_id, offset, after in zip(token_ids, offsets, [*offsets[1:], len(text)], strict=True):
            shown, data = text[offset:after], bytes_of[token_id]
            if token_id < 3:
                # The U+FFFD is of bytes before it, which might have become a character behind it.
                expected = data.decode() if options.get("skip_special_tokens") is False else ""
                assert shown.lstrip("\ufffd") == expected
            elif data.isascii():
                assert shown == data.decode()
            else:
                assert shown in ("", "€", "\ufffd")


def test_tokens_found_in_the_prefix_cache_are_told(stub_server):
    prompt = "cached" * 20
    details = [answer(stub_server, prompt=prompt, cache_salt="s")["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert [entry["cached_tokens"] for entry in details] == [0, 112]
    other = answer(stub_server, prompt=prompt, cache_salt="another", n=3)["usage"]["prompt_tokens_details"]
    assert other["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("frequency_penalty", 0.5, "only 0 or null is possible; penalties are not supported yet"),
        ("presence_penalty", -1, "only 0"),
        ("repetition_penalty", 1.1, "only 1"),
        ("logit_bias", {"5": 1}, "only {}"),
        ("suffix", "x", "only null"),
        ("best_of", 2, "best_of is 2; only the value of n"),
        ("response_format", {"type": "json_object"}, "forced formats are not supported yet"),
        ("guided_json", {}, "guided_json is not supported"),
        ("n", 129, "less than or equal to 128"),
        ("n", 0, "greater than or equal to 1"),
        ("n", "1", "valid integer"),
        ("n", True, "valid integer"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("max_tokens", 10**30, "less than or equal to"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", "hot", "valid number"),
        ("top_p", 0, "greater than 0"),
        ("top_k", -2, "greater than or equal to -1"),
        ("min_p", 2, "less than or equal to 1"),
        ("logprobs", 21, "less than or equal to 20"),
        ("seed", 2**64, "less than or equal to"),
        ("stop", [""], "at least one character"),
        ("stop", ["a"] * 65, "may have 64"),
        ("stop", "\ud800", "half of a character"),
        ("cache_salt", "\ud800", "half of a character"),
        ("stop_token_ids", list(range(257)), "at most 256 items"),
        ("prompt", [], "it must be a text"),
        ("prompt", {"a": 1}, "it must be a text"),
        ("prompt", ["a", 1], "number 1 is not a text, like those before it"),
        ("prompt", [[1], "a"], "number 1 is not a list of token ids"),
        ("prompt", [1.5], "number 0 is not a list of token ids"),
        ("prompt", ["a"] * 3000, "may have 2048"),
        ("prompt", "\ud800", "half of a character"),
        ("prompt", [-1], "token id -1 is not in the vocabulary"),
        ("prompt", [2**70], "is not in the vocabulary"),
        ("prompt", [10**4000], "is not in the vocabulary"),
        ("prompt", "", "is empty"),
        ("priority", -1, "priority is -1"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream"),
    ],
)
def test_what_cannot_be_is_refused_by_name(stub_server, field, value, words):
    refusal = error(stub_server, **({"prompt": "a", "max_tokens": 1} | {field: value}))
    assert words in refusal["message"]
    assert refusal["type"] == "invalid_request_error"
    assert refusal["param"].startswith(field)
    assert len(refusal["message"]) < 300


def test_one_request_cannot_fill_the_queue(stub_server):
    message = error(stub_server, prompt=["a"] * 100, n=100, max_tokens=1)["message"]
    assert "100 prompts with n = 100 make 10,000 choices; a request may have 2,048" in message


def test_values_that_ask_for_nothing_are_taken(stub_server):
    neutral = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "suffix": None,
        "n": 1, "best_of": 1, "stop": [], "stream": False, "logprobs": None, "user": "me", "echo": False,
        "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "seed": -1, "stop_token_ids": [], "min_tokens": 0,
    }  # fmt: skip
    assert texts(stub_server, prompt="a", max_tokens=2, **neutral) == ["aa"]


def test_the_tokens_of_completions_are_shown_to_who_asks_for_them(stub_server):
    prompts = ["ab", "a€c"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 5, "return_token_ids": True}
    whole = answer(stub_server, **body)["choices"]
    ids = [httpx.post(f"{stub_server.url}/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert [choice["prompt_token_ids"] for choice in whole] == [ids[0], ids[0], ids[1], ids[1]]
    assert [stub_server.llm.tokenizer.decode(choice["token_ids"]) for choice in whole] == [c["text"] for c in whole]
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = post(stub_server, **body, stream=True, stream_options=options)
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 20)
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        shown = [chunk["choices"][0] for chunk in own]
        prompt_ids = choice["prompt_token_ids"]
        assert [piece.get("prompt_token_ids") for piece in shown] == [prompt_ids] + [None] * (len(own) - 1)
        assert [token_id for piece in shown for token_id in piece["token_ids"]] == choice["token_ids"]
        counts = [chunk["usage"]["completion_tokens"] for chunk in own]
        assert counts == sorted(counts)
        assert counts[-1] == 5
        assert {chunk["usage"]["prompt_tokens"] for chunk in own} == {len(prompt_ids)}


def test_a_model_that_is_not_served_is_not_found(stub_server):
    response = post(stub_server, model="gpt-5", prompt="a")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("X-Priority", "-1", "X-Priority is -1"),
        ("X-Priority", "high", "X-Priority is 'high'; it must be an integer"),
        ("X-Timeout-S", "0", "X-Timeout-S is 0"),
        ("X-Timeout-S", "nan", "X-Timeout-S is nan"),
        ("X-Queue-Timeout-S", "soon", "X-Queue-Timeout-S is 'soon'; it must be a number of seconds"),
    ],
)
def test_headers_that_cannot_be_are_refused(stub_server, name, value, words):
    response = httpx.post(stub_server.url + PATH, json={"model": "stub", "prompt": "a"}, headers={name: value})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_request_may_have_less_time_than_the_server_gives(stub_server):
    body = {"model": "stub", "prompt": "!slow", "max_tokens": 500}
    response = httpx.post(stub_server.url + PATH, json=body, headers={"X-Timeout-S": "0.3"})
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"


def test_all_prompts_are_taken_in_or_none(stub_server):
    message = error(stub_server, prompt=["!slow", "!slow", ""], max_tokens=500)["message"]
    assert "is empty" in message
    stub_server.wait_until_idle(timeout_s=1.0)


def test_an_operator_may_end_all_prompts_of_a_request(stub_server):
    body = {"model": "stub", "prompt": ["!slow", "!slow!"], "n": 2, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", stub_server.url + PATH, json=body) as response:
        lines = response.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert stub_server.run(stub_server.llm.abort(request_id))
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "request_aborted"


def test_the_real_engine_repeats_itself(tiny_server):
    """Greedy, seeded and cut at any place, and with the tokens of its own log-probabilities."""
    greedy = answer(tiny_server, prompt="Hello", max_tokens=20, temperature=0, ignore_eos=True, logprobs=3)
    (choice,) = greedy["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 20
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value == max(top.values())
        assert len(top) == 3
    seeded = {"prompt": "Hello", "max_tokens": 20, "seed": 7, "ignore_eos": True, "n": 2, "temperature": 2}
    first, second = texts(tiny_server, **seeded)
    assert texts(tiny_server, **seeded) == [first, second]
    assert first != second
