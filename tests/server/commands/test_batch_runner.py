import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_openai import Asked, FakeOpenAI

import jaxllm.server.commands.batch.runner as batch_runner
from jaxllm.server.commands.cli import main


def request(number: int, **body) -> dict:
    body = {"model": "fake", "prompt": f"question {number}", "max_tokens": 2} | body
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture
def run_batch(tmp_path, capsys):
    """(server, lines of the input, …options) -> (exit code, lines of the output, stderr)"""

    def run(server: FakeOpenAI, lines, *options: str):
        write_lines(tmp_path / "in.jsonl", *lines)
        files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
        code = main(["run-batch", *files, "--url", server.url, *options])
        path = tmp_path / "out.jsonl"
        return code, read_lines(path) if path.exists() else [], capsys.readouterr().err

    return run


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(batch_runner, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(batch_runner, "GIVE_UP_S", 0.5)


def test_each_line_gets_its_answer_in_openais_format(run_batch):
    with FakeOpenAI() as server:
        code, lines, err = run_batch(server, [request(n) for n in range(3)])
    assert code == 0
    assert "3 of 3 done, 0 failed" in err
    for number, line in enumerate(lines):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["custom_id"] == f"r{number}"
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["text"] == "w0 w1 "
    assert len({line["id"] for line in lines}) == 3


def test_the_order_is_that_of_the_input_whoever_finishes_first(run_batch):
    lens = [60, 1, 30, 1, 1, 20, 1, 1]
    with FakeOpenAI(step_s=0.005) as server:
        _, lines, _ = run_batch(server, [request(n, max_tokens=length) for n, length in enumerate(lens)])
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(len(lens))]
    assert [line["response"]["body"]["usage"]["completion_tokens"] for line in lines] == lens
    assert server.max_running > 2


def test_no_more_run_at_once_than_asked_for(run_batch):
    with FakeOpenAI(first_s=0.01) as server:
        run_batch(server, [request(n) for n in range(12)], "--concurrency", "3")
    assert server.max_running == 3
    assert server.num_connections <= 4


def test_answers_that_wait_for_an_earlier_one_are_bounded(run_batch, monkeypatch):
    monkeypatch.setattr(batch_runner, "LINES_AHEAD", 2)
    asked_before_first_answer = []

    def reply(asked: Asked):
        if asked.body.get("max_tokens") == 50:
            return None
        asked_before_first_answer.append(asked.number)
        return None

    with FakeOpenAI(step_s=0.01, reply=reply) as server:
        lines = [request(0, max_tokens=50), *(request(n, max_tokens=1) for n in range(1, 40))]
        code, answers, _ = run_batch(server, lines, "--concurrency", "2")
    assert code == 0
    assert len(answers) == 40
    first_end = next(asked.number for asked in server.asked if asked.body.get("prompt") == "question 4")
    assert first_end <= 6


@pytest.mark.parametrize(
    ("line", "custom_id", "message"),
    [
        ("{nonsense", None, "not a request of a batch"),
        ("[1]", None, "not a request of a batch"),
        ({"custom_id": "x", "url": "/v1/completions"}, "x", "missing required field `body`"),
        (request(7) | {"priority": 1}, "r7", "unknown field `priority`"),
        (request(7) | {"method": "GET"}, "r7", "method is 'GET'; it must be POST"),
        (request(7) | {"url": "http://elsewhere/"}, "r7", "it must be a path such as /v1/chat/completions"),
        (request(7) | {"url": "/v1/x HTTP/1.1\r\nevil: 1"}, "r7", "it must be a path such as"),
        (request(7, stream=True), "r7", "body.stream is true"),
        (request(0), "r0", "custom_id 'r0' is also that of an earlier line"),
    ],
)
def test_a_bad_line_fails_alone(run_batch, line, custom_id, message):
    with FakeOpenAI() as server:
        code, lines, err = run_batch(server, [request(0), line, request(1)])
    assert code == 1
    assert "3 of 3 done, 1 failed" in err
    assert [answer["custom_id"] for answer in lines] == ["r0", custom_id, "r1"]
    assert lines[1]["response"] is None
    assert lines[1]["error"]["code"] == "invalid_request"
    assert message in lines[1]["error"]["message"]
    assert len(server.bodies("/v1/completions")) == 2


def test_what_the_server_refuses_is_written_with_its_status(run_batch):
    def reply(asked: Asked):
        if asked.body.get("prompt") == "question 1":
            return 400, {"x-request-id": "abc"}, {"error": {"message": "too long", "code": "x"}}
        return None

    with FakeOpenAI(reply=reply) as server:
        code, lines, _ = run_batch(server, [request(n) for n in range(3)])
    assert code == 1
    assert lines[1]["error"] is None
    assert lines[1]["response"] == {
        "status_code": 400,
        "request_id": "abc",
        "body": {"error": {"message": "too long", "code": "x"}},
    }
    assert lines[2]["response"]["status_code"] == 200


def test_a_request_without_an_end_fails_by_timeout(run_batch):
    with FakeOpenAI(step_s=0.01) as server:
        code, lines, _ = run_batch(server, [request(0, max_tokens=100), request(1)], "--timeout-s", "0.2")
    assert code == 1
    assert lines[0]["error"] == {"code": "no_answer", "message": "no end after 0.2 s (--timeout-s)"}
    assert lines[1]["error"] is None


def test_a_full_server_is_asked_again_when_it_says(run_batch, quick_retries):
    def reply(asked: Asked):
        if asked.path == "/v1/completions" and asked.number in (1, 2):
            return (429, {"retry-after": "0.2"}, {}) if asked.number == 1 else (503, {}, {})
        return None

    start = time.perf_counter()
    with FakeOpenAI(reply=reply) as server:
        code, lines, _ = run_batch(server, [request(0)])
    assert time.perf_counter() - start > 0.2
    assert code == 0
    assert lines[0]["response"]["status_code"] == 200


def test_a_connection_that_breaks_is_tried_again(run_batch, quick_retries):
    def reply(asked: Asked):
        if asked.path == "/v1/completions" and asked.number < 4:
            raise ConnectionError
        return None

    with FakeOpenAI(reply=reply) as server:
        code, _, _ = run_batch(server, [request(0)])
    assert code == 0


def test_a_server_that_stays_full_stops_the_batch_which_goes_on_later(run_batch, quick_retries):
    is_full = [True]

    def reply(asked: Asked):
        is_late = asked.body.get("prompt") == "question 2"
        return (503, {}, {"error": {"message": "draining"}}) if is_late and is_full[0] else None

    lines = [request(n) for n in range(5)]
    with FakeOpenAI(reply=reply) as server:
        code, answers, err = run_batch(server, lines, "--concurrency", "1")
        assert code == 2
        assert [line["custom_id"] for line in answers] == ["r0", "r1"]
        assert err.count("waiting for the server: HTTP 503: draining") == 1
        assert "error: stopped at 'r2', after " in err
        assert " s: HTTP 503: draining" in err
        assert "the same command goes on from there" in err
        is_full[0] = False
        code, answers, err = run_batch(server, lines)
    assert code == 0
    assert [line["custom_id"] for line in answers] == [f"r{n}" for n in range(5)]
    assert "5 of 5 done (2 of them before), 0 failed" in err
    prompts = [body["prompt"] for body in server.bodies("/v1/completions")]
    assert prompts.count("question 0") == prompts.count("question 1") == 1


def test_what_is_done_is_not_run_again_and_a_torn_line_is(run_batch, tmp_path):
    lines = [request(n) for n in range(4)]
    with FakeOpenAI() as server:
        run_batch(server, lines)
        whole = (tmp_path / "out.jsonl").read_bytes()
        first, second, *_ = whole.splitlines(keepends=True)
        (tmp_path / "out.jsonl").write_bytes(first + second[: len(second) // 2])
        num_before = len(server.asked)
        code, answers, _ = run_batch(server, lines)
        assert code == 0
        assert (tmp_path / "out.jsonl").read_bytes().startswith(first)
        assert [line["custom_id"] for line in answers] == ["r0", "r1", "r2", "r3"]
        assert [asked.body["prompt"] for asked in server.asked[num_before + 1 :]] == [
            "question 1",
            "question 2",
            "question 3",
        ]
        num_before = len(server.asked)
        code, _, _ = run_batch(server, lines)
        assert code == 0
        assert len(server.asked) == num_before


def test_a_full_disk_is_one_line_and_code_2_and_the_same_command_goes_on(run_batch):
    requests, limit = [request(n) for n in range(30)], resource.getrlimit(resource.RLIMIT_FSIZE)
    with FakeOpenAI() as server:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limit[1]))
        try:
            code, _, err = run_batch(server, requests)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        num_done, *lines = err.splitlines()
        assert code == 2
        assert re.fullmatch(r"[1-9]\d? of 30 done, 0 failed", num_done)
        assert lines[0] == "the same command goes on from there"
        assert re.fullmatch(r"error: .*out.jsonl cannot be written: File too large.*", lines[1])
        assert len(lines) == 2
        code, answers, err = run_batch(server, requests)
        assert code == 0
        assert f"30 of 30 done ({num_done.split()[0]} of them before), 0 failed" in err
        assert [answer["custom_id"] for answer in answers] == [f"r{n}" for n in range(30)]


def test_failures_of_an_earlier_run_count(run_batch):
    with FakeOpenAI() as server:
        assert run_batch(server, ["{"])[0] == 1
        code, _, err = run_batch(server, ["{", request(0)])
    assert code == 1
    assert "2 of 2 done (1 of them before), 1 failed" in err


def test_an_output_of_another_batch_is_left_alone(run_batch, tmp_path):
    with FakeOpenAI() as server:
        run_batch(server, [request(0), request(1)])
        before = (tmp_path / "out.jsonl").read_bytes()
        code, _, err = run_batch(server, [request(0), request(9), request(1)])
        assert code == 2
        assert "belongs to another input: its line 2 answers 'r1', and line 2 of the input is 'r9'" in err
        assert "goes on from there" not in err
        code, _, err = run_batch(server, [request(0)])
        assert code == 2
        assert "has 2 answers, and the input 1 requests" in err
        assert (tmp_path / "out.jsonl").read_bytes() == before
        (tmp_path / "out.jsonl").write_text("my diary\n")
        code = main(["run-batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--url", server.url])
    assert code == 2
    assert (tmp_path / "out.jsonl").read_text() == "my diary\n"


def test_the_key_is_sent_and_a_missing_one_stops_before_any_line(run_batch, monkeypatch):
    def reply(asked: Asked):
        return None if asked.headers.get("authorization") == "Bearer k1" else (401, {}, {"error": {"message": "no"}})

    with FakeOpenAI(reply=reply) as server:
        code, lines, err = run_batch(server, [request(0)])
        assert code == 2
        assert lines == []
        assert "wants an API key, by --api-key or JAXLLM_API_KEY: HTTP 401: no" in err
        assert run_batch(server, [request(0)], "--api-key", "k1")[0] == 0
        monkeypatch.setenv("JAXLLM_API_KEY", "k1")
        assert run_batch(server, [request(0), request(1)])[0] == 0


def test_a_server_that_is_not_there_is_told_at_once(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", request(0))
    files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    start = time.perf_counter()
    assert main(["run-batch", *files, "--url", "http://127.0.0.1:9"]) == 2
    assert time.perf_counter() - start < 5
    assert "error: http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_written(tmp_path):
    write_lines(tmp_path / "in.jsonl", *(request(n, max_tokens=1 if n < 3 else 10_000) for n in range(6)))
    with FakeOpenAI(step_s=0.01) as server:
        command = [sys.executable, "-m", "jaxllm.server.commands.cli", "run-batch", "in.jsonl", "-o", "out.jsonl"]
        process = subprocess.Popen(
            [*command, "--url", server.url], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ
        )
        out = tmp_path / "out.jsonl"
        deadline = time.monotonic() + 30
        while not (out.exists() and out.read_bytes().count(b"\n") == 3):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "3 of 6 done, 0 failed\nthe same command goes on from there\ninterrupted\n" in err
    assert len(read_lines(out)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name either --url URL or MODEL"),
        (["model", "--url", "http://x"], "name either --url URL or MODEL"),
        (["--url", "http://x", "--page-size", "8"], "--page-size is for an engine of this command"),
        (["--url", "http://x", "--served-model-name", "m"], "--served-model-name is for an engine of this command"),
        (["model", "--api-key", "k"], "--api-key belongs to --url"),
        (["model", "--concurrency", "0"], "--concurrency is 0; it must be 1 or more"),
        (["model", "--timeout-s", "0"], "--timeout-s is 0; it must be above 0"),
        (["model", "other"], "unexpected argument 'other'"),
        (["model", "--page-sice", "8"], "unknown option --page-sice; did you mean --page-size?"),
    ],
)
def test_a_mistaken_command_line_is_refused(options, message, tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", request(0))
    with pytest.raises(SystemExit) as exit_:
        main(["run-batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *options])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_input_that_is_not_there_and_one_that_is_the_output_are_refused(tmp_path, capsys):
    url = ["--url", "http://x"]
    assert main(["run-batch", str(tmp_path / "no.jsonl"), "-o", str(tmp_path / "out.jsonl"), *url]) == 2
    assert "no.jsonl cannot be read" in capsys.readouterr().err
    path = str(write_lines(tmp_path / "in.jsonl", request(0)))
    with pytest.raises(SystemExit):
        main(["run-batch", path, "-o", path, *url])
    assert "is both INPUT and OUTPUT" in capsys.readouterr().err
    assert read_lines(tmp_path / "in.jsonl") == [request(0)]
    assert main(["run-batch", path, "-o", str(tmp_path / "no" / "out.jsonl"), *url]) == 2
    assert "cannot be written" in capsys.readouterr().err


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "ab"}},
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"n": 0}},
    {"custom_id": "d", "method": "POST", "url": "/v1/nothing", "body": {}},
]


def check_answers(lines: list[dict]) -> None:
    assert [line["custom_id"] for line in lines] == ["a", "b", "c", "d"]
    assert [line["response"]["status_code"] for line in lines] == [200, 200, 400, 404]
    bodies = [line["response"]["body"] for line in lines]
    assert bodies[0]["object"] == "chat.completion"
    assert bodies[0]["usage"]["completion_tokens"] == 5
    assert bodies[1]["object"] == "text_completion"
    assert bodies[2]["error"]["param"] == "n"
    assert all(line["response"]["request_id"] for line in lines)


def test_a_batch_on_our_server(start_stub, run_batch):
    code, lines, _ = run_batch(start_stub(served_model_name=["m"]), LINES)
    assert code == 1
    check_answers(lines)


def test_a_batch_on_an_engine_of_its_own_gives_what_the_server_gives(tiny_server_folder, tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", *LINES)
    options = "--served-model-name m --dtype float32 --max-num-seqs 4 --max-num-batched-tokens 32 --page-size 8"
    options += " --num-pages 64 --compilation-cache-dir="
    files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), str(tiny_server_folder)]
    assert main(["run-batch", *files, *options.split()]) == 1
    assert "4 of 4 done, 2 failed" in capsys.readouterr().err
    check_answers(read_lines(tmp_path / "out.jsonl"))
