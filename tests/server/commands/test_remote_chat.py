import itertools
import os
import signal

import pytest
from fake_openai import Asked, FakeOpenAI

from jaxllm.server.commands.chat.remote import RemoteModel
from jaxllm.server.commands.cli import main


def event_stream(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + body


@pytest.fixture
def chat(monkeypatch, capsys):
    """(server, lines, …options) -> (exit code, stdout, stderr) after these lines are typed."""

    def run(server: FakeOpenAI, lines, *options: str):
        typed = iter([*lines, EOFError])

        def type_line(prompt: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", type_line)
        code = main(["chat", "--url", server.url, *options])
        return code, *capsys.readouterr()

    return run


def test_the_conversation_goes_to_the_server_and_its_answers_are_streamed(chat):
    with FakeOpenAI() as server:
        options = ("--system", "be brief", "--max-tokens", "2", "--temperature", "0", "--seed", "3", "--api-key", "k")
        code, out, err = chat(server, ["one", "two"], *options)
    assert code == 0
    assert out == "w0 w1 \nw0 w1 \n"
    first, second = server.bodies("/v1/chat/completions")
    system = {"role": "system", "content": "be brief"}
    assert first["messages"] == [system, {"role": "user", "content": "one"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "w0 w1 "},
        {"role": "user", "content": "two"},
    ]
    assert first.keys() == {"model", "messages", "stream", "stream_options", "max_tokens", "temperature", "seed"}
    assert (first["model"], first["max_tokens"], first["temperature"], first["seed"]) == ("fake", 2, 0.0, 3)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer k"}
    assert f"fake at {server.url}" in err
    assert "cut off by --max-tokens 2" in err
    assert "4 tokens in" in err


def test_the_figures_are_the_servers_counts_and_our_times(chat):
    with FakeOpenAI(first_s=0.2, step_s=0.02) as server:
        _, _, err = chat(server, ["one"], "--max-tokens", "6")
    assert "start-up" not in err
    ttft_ms, tpot_ms = (float(err.partition(f"{name} ")[2].partition(" ms")[0]) for name in ("TTFT", "TPOT"))
    assert 200 <= ttft_ms < 300
    assert 20 <= tpot_ms < 40


def test_a_full_context_is_recognised_by_what_the_server_says_of_its_model(chat):
    with FakeOpenAI() as server:  # its model has a context of 64 tokens
        _, _, err = chat(server, ["a " * 50], "--max-tokens", "9")
    assert "the context of 64 tokens is full" in err


def test_ctrl_c_stops_the_answer_and_the_server_notices(chat, monkeypatch):
    real = RemoteModel.answer_to

    def answer_to(self, messages):
        stream = real(self, messages)
        try:
            for number in itertools.count():
                if number == 3 and messages[-1]["content"] == "forever":
                    os.kill(os.getpid(), signal.SIGINT)
                try:
                    yield next(stream)
                except StopIteration as end:
                    return end.value
        finally:
            stream.close()

    monkeypatch.setattr(RemoteModel, "answer_to", answer_to)
    with FakeOpenAI(step_s=0.01) as server:
        server.reply = lambda asked: (
            asked.body.update(max_tokens=100_000)
            if asked.body.get("messages", [{}])[-1].get("content") == "forever"
            else None
        )
        code, out, err = chat(server, ["forever", "next"])
    assert code == 0
    assert out.startswith("w0 w1 w2 w3 \nw0 w1 w2 \n")
    assert "[stopped]" in err
    assert server.num_gone == 1
    assert server.bodies("/v1/chat/completions")[1]["messages"][1]["content"] == "w0 w1 w2 w3 "


def test_reasoning_is_shown_but_is_not_the_answer(chat):
    events = ('{"reasoning_content": "hm"}', '{"content": "yes"}', "{}")
    stream = event_stream(
        *(f'{{"choices": [{{"index": 0, "delta": {delta}, "finish_reason": null}}]}}' for delta in events[:2]),
        '{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
        "[DONE]",
    )
    with FakeOpenAI(reply=lambda asked: stream if asked.method == "POST" else None) as server:
        _, out, err = chat(server, ["one", "two"])
    assert out == "yes\nyes\n"
    assert "hm" in err
    assert server.bodies("/v1/chat/completions")[1]["messages"][1] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {}, {"error": {"message": "the prompt has 99 tokens"}}), "HTTP 400: the prompt has 99 tokens"),
        (event_stream("{nonsense"), "sends what is no event of OpenAI's API: {nonsense"),
        (event_stream('{"error": {"message": "the engine died"}}', "[DONE]"), "error: the engine died"),
        (event_stream('{"choices": [{"index": 0, "delta": {"content": "a"}}]}'), "has ended the answer too early"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: {}\n\n",
            "hung up in the middle|ended the answer too early",
        ),
    ],
)
def test_what_goes_wrong_is_told_and_the_conversation_goes_on(chat, answer, message):
    is_first = [True]

    def reply(asked: Asked):
        if asked.method == "POST" and is_first[0]:
            is_first[0] = False
            return answer
        return None

    with FakeOpenAI(reply=reply) as server:
        code, out, err = chat(server, ["one", "two"])
    assert code == 0
    assert any(part in err for part in message.split("|"))
    assert "the message was left out of the conversation" in err
    assert out.endswith("w0 w1 w2 \n")
    assert server.bodies("/v1/chat/completions")[1]["messages"] == [{"role": "user", "content": "two"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model"], "name either --url URL or MODEL"),
        (["--page-size", "8"], "--page-size is for an engine of this command"),
    ],
)
def test_what_does_not_belong_to_a_server_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        main(["chat", "--url", "http://127.0.0.1:9", *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chat"], "no model: name MODEL, or a server by --url URL"),
        (["chat", "model", "--api-key", "k"], "--api-key belongs to --url"),
        (["chat", "model", "--model-name", "m"], "--model-name belongs to --url"),
    ],
)
def test_without_a_url_there_must_be_a_model(argv, message, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err


def test_errors_before_the_conversation_end_it(chat, capsys):
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "error: http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert main(["chat", "--url", "localhost:80"]) == 2
    assert "it must be http://HOST:PORT" in capsys.readouterr().err
    with FakeOpenAI() as server:
        code, _, err = chat(server, [], "--model-name", "other")
        assert (code, "--model-name is 'other'; the server has 'fake'" in err) == (2, True)
        code, _, err = chat(server, [], "--temperature", "-1")
        assert (code, "temperature is -1.0" in err) == (2, True)
    with FakeOpenAI(reply=lambda asked: (401, {}, {"error": {"message": "no key"}})) as server:
        code, _, err = chat(server, [])
        assert (code, "/v1/models answers HTTP 401: no key" in err) == (2, True)
    with FakeOpenAI(reply=lambda asked: (200, {}, b"<html>")) as server:
        code, _, err = chat(server, [])
        assert (code, "it is no server of OpenAI's API" in err) == (2, True)


def test_a_conversation_with_our_server(stub_server, chat):
    """The stub repeats the prompt, which the template makes "[user]hi[assistant]"."""
    code, out, err = chat(stub_server, ["hi"], "--max-tokens", "8")
    assert code == 0
    assert out == "[user]hi\n"
    assert "8 tokens in" in err
    assert "cut off by --max-tokens 8" in err
