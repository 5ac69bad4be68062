"""`jaxllm serve` from its first line to its last: start, workers, drain, signals, and no orphans."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from raw_http import connect, read_until
from streaming_client import Streaming


def test_it_says_what_it_does(run_serve):
    server = run_serve()
    log = "".join(server.lines)
    assert f"loading {server.processes[0].cmdline()[-1].split(chr(39))[3]}" in log
    assert "the engine is ready after" in log
    assert "context of 2,048 tokens, 2,048 pages of 16 tokens" in log
    assert "--tool-call-parser hermes (by the chat template), --reasoning-parser none (by the chat template)" in log
    assert f"serving at {server.url}/v1, with a page at {server.url}/; no API key is asked for" in log
    server.signal()
    assert server.wait() == 0
    assert "ended" in server.lines[-1]
    server.assert_no_orphans()


def test_logs_can_be_json(run_serve):
    server = run_serve(log_format="json")
    httpx.post(server.url + "/v1/completions", json={"model": "stub", "prompt": "ab", "max_tokens": 3})
    server.wait_for(lambda: any("/v1/completions" in line for line in server.lines))
    lines = [json.loads(line) for line in server.lines]
    assert next(line for line in lines if line["event"] == "request")["output_tokens"] == 3


def test_the_engines_lines_are_as_those_of_the_server(run_serve):
    """Also when its process has been started again."""
    server = run_serve(log_format="json")

    def engine_lines() -> list[dict]:
        lines = [json.loads(line) for line in server.lines]
        return [line for line in lines if line.get("logger") == "jaxllm.engine.process.server"]

    def ask(prompt: str) -> int:
        body = {"model": "stub", "prompt": prompt, "max_tokens": 3}
        return httpx.post(server.url + "/v1/completions", json=body).status_code

    assert ask("!raise") == 500
    server.wait_for(engine_lines)
    (line,) = engine_lines()
    assert (line["level"], line["message"]) == ("error", "a step failed; the requests that were in it end")
    assert "a defect in step" in line["exception"]
    os.kill(
        next(p for p in server.find_processes()[1:] if "process.child" in " ".join(p.cmdline())).pid, signal.SIGKILL
    )
    server.wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503)
    server.wait_for(lambda: httpx.get(server.url + "/ready").status_code == 200)
    assert ask("!raise") == 500
    server.wait_for(lambda: len(engine_lines()) == 2)


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.nightly), "json"])
def test_keys_do_not_appear_in_logs_nor_answers(run_serve, tmp_path, log_format):
    key, wrong, admin = "sk-alice-0123456789", "sk-wrong-0123456789", "sk-admin-0123456789"
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"key": key, "name": "alice"}]}))
    server = run_serve(
        log_format=log_format, log_level="debug", api_keys_file=str(tmp_path / "keys.json"), admin_key=admin
    )
    body = {"model": "stub", "prompt": "ab", "max_tokens": 2}
    for sent in (key, wrong, admin):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/admin/drain", "/admin/undrain"):
            for headers in ({"Authorization": f"Bearer {sent}"}, {"X-Api-Key": sent}):
                assert sent not in httpx.post(server.url + path, json=body, headers=headers).text
    server.signal()
    assert server.wait() == 0
    log = "".join(server.lines)
    assert "alice" in log, "the line of a request has the name of its key"
    assert not [secret for secret in (key, wrong, admin) if secret in log]


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(run_serve):
    server = run_serve()
    streaming = Streaming(server.url, 40)
    streaming.wait_until_begun()
    server.signal()
    server.wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503)
    refused = httpx.post(server.url + "/v1/completions", json={"model": "stub", "prompt": "a"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "shutting down" in refused.json()["error"]["message"]
    assert httpx.get(server.url + "/health").status_code == 200
    streaming.assert_complete()
    assert server.wait() == 0
    server.assert_no_orphans()


@pytest.mark.parametrize("second_signal", [False, True])
def test_what_does_not_finish_in_time_ends_with_an_error(run_serve, second_signal):
    server = run_serve(shutdown_timeout_s=30.0 if second_signal else 0.5)
    streaming = Streaming(server.url, 2000)
    streaming.wait_until_begun()
    start = time.monotonic()
    server.signal()
    if second_signal:
        server.wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503)
        server.signal(signal.SIGINT)
    streaming.wait()
    assert server.wait() == 0
    assert time.monotonic() - start < 5.0
    assert streaming.error is None, "the stream must end by itself"
    assert streaming.chunks[-1]["error"]["code"] == "shutting_down"
    assert streaming.chunks[-1]["error"]["type"] == "server_error"
    server.assert_no_orphans()


def test_an_answer_that_is_not_streamed_ends_with_503_too(run_serve):
    server = run_serve(shutdown_timeout_s=0.2)
    answers = []
    body = {"model": "stub", "prompt": "!slow", "max_tokens": 2000}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=60))
    )
    thread.start()
    server.wait_for(lambda: httpx.get(server.url + "/load").json()["num_running"] == 1)
    server.signal()
    thread.join(20)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "shutting_down"
    assert server.wait() == 0


def test_an_engine_that_is_stuck_does_not_keep_the_server_from_ending(run_serve):
    server = run_serve(shutdown_timeout_s=0.5)
    streaming = Streaming(server.url, 2000)
    streaming.wait_until_begun()
    stuck = Streaming(server.url, 5, prompt="!hang")
    server.wait_for(lambda: httpx.get(server.url + "/load").json()["server_load"] == 2)
    start = time.monotonic()
    server.signal()
    assert server.wait() == 0
    assert time.monotonic() - start < 8
    streaming.wait()
    assert streaming.error is None
    assert streaming.chunks[-1]["error"]["code"] == "shutting_down"
    stuck.wait()
    server.assert_no_orphans()


@pytest.mark.parametrize("api_workers", [1, 2])
def test_options_that_the_model_does_not_bear_are_told_once(run_serve, tmp_path, api_workers):
    (tmp_path / "template.jinja").write_text("{% if %}")
    server = run_serve(chat_template=str(tmp_path / "template.jinja"), api_workers=api_workers, wait=False)
    assert server.process.wait(60) != 0
    server.wait()
    assert "".join(server.lines).count("template.jinja is not a Jinja template") == 1


@pytest.mark.parametrize("api_workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_nothing_is_left_when_it_is_killed(run_serve, api_workers):
    server = run_serve(api_workers=api_workers)
    assert len(server.processes) >= 1 + api_workers
    streaming = Streaming(server.url, 2000)
    streaming.wait_until_begun()
    server.signal(signal.SIGKILL)
    server.assert_no_orphans()
    streaming.wait()
    assert not list(server.folder.glob("jaxllm-*")), "files are left in the folder for temporary ones"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_a_signal_to_the_whole_group_is_one_signal(run_serve, number):
    """As Ctrl-C in a terminal or its end, and as service managers do it."""
    server = run_serve(api_workers=2)
    streaming = Streaming(server.url, 20)
    streaming.wait_until_begun()
    os.killpg(server.process.pid, number)
    streaming.assert_complete()
    assert server.wait() == 0
    server.assert_no_orphans()


def test_a_server_under_nohup_does_not_end_with_its_terminal(run_serve):
    server = run_serve(ignored=signal.SIGHUP)
    os.killpg(server.process.pid, signal.SIGHUP)
    time.sleep(0.3)
    assert httpx.get(server.url + "/ready").status_code == 200


def test_a_server_can_be_ended_where_its_parent_ignores_sigterm(run_serve):
    server = run_serve(ignored=signal.SIGTERM)
    server.signal()
    assert server.wait() == 0


def test_a_signal_while_the_model_loads_ends_it_at_once(run_serve):
    server = run_serve(engine="stub_engine:SlowStartEngine", wait=False)
    server.wait_for(lambda: any("loading" in line for line in server.lines))
    server.wait_for(lambda: len(server.find_processes()) >= 2)
    server.processes = server.find_processes()
    start = time.monotonic()
    server.signal()
    assert server.wait() == 0
    assert time.monotonic() - start < 8
    assert "stopped before the engine was ready" in "".join(server.lines)
    server.assert_no_orphans()


def test_several_workers_serve_one_engine(run_serve):
    server = run_serve(api_workers=2, admin_key="admin-key-of-tests")
    streams = [Streaming(server.url, 30) for _ in range(12)]
    with httpx.Client(base_url=server.url) as client:
        server.wait_for(lambda: client.get("/load").json()["num_running"] == 12)
        assert client.get("/load").json()["server_load"] == 12
        for stream in streams:
            stream.assert_complete()
        assert client.get("/load").json()["server_load"] == 0
    # Workers take connections from one queue, whoever has time.
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server.url)) for _ in range(60)]
        for raw in clients:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n")
            read_until(raw, b'"ok"}')
        counts = [
            sum(
                c.status == "ESTABLISHED" and c.laddr.port == int(server.url.rsplit(":", 1)[1])
                for c in p.net_connections()
            )
            for p in server.find_workers()
        ]
    assert sum(counts) == 60
    assert min(counts) >= 1, counts


def test_an_operator_reaches_all_workers_through_one(run_serve):
    server = run_serve(api_workers=3, admin_key="admin-key-of-tests")
    headers = {"Authorization": "Bearer admin-key-of-tests"}

    def statuses() -> set[int]:
        return {httpx.get(server.url + "/ready").status_code for _ in range(12)}  # each on a connection of its own

    assert statuses() == {200}
    httpx.post(server.url + "/admin/drain", headers=headers).raise_for_status()
    assert statuses() == {503}
    httpx.post(server.url + "/admin/undrain", headers=headers).raise_for_status()
    assert statuses() == {200}


def test_a_worker_that_dies_is_started_again_and_the_others_go_on(run_serve):
    server = run_serve(api_workers=2)
    workers = server.find_workers()
    assert len(workers) == 2
    streams = [Streaming(server.url, 60) for _ in range(8)]
    for stream in streams:
        stream.wait_until_begun()
    workers[0].kill()
    for stream in streams:
        stream.wait()
    complete = [stream for stream in streams if stream.error is None]
    assert complete
    for stream in complete:
        stream.assert_complete()
    server.wait_for(lambda: len(server.find_workers()) == 2)
    server.wait_for(lambda: sum("it starts again" in line for line in server.lines) == 1)
    for _ in range(10):
        assert httpx.get(server.url + "/health", timeout=20).status_code == 200
    server.wait_for(lambda: httpx.get(server.url + "/load", timeout=20).json()["num_running"] == 0)
    server.processes = server.find_processes()
    server.signal()
    assert server.wait() == 0
    server.assert_no_orphans()


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    command = Path(sys.executable).with_name("jaxllm")
    return subprocess.run([command, "serve", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_a_port_that_is_taken_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for workers in ("1", "2"):
            result = run_command("smollm2-135m", "--port", str(port), "--api-workers", workers)
            assert result.returncode == 2
            assert f"error: cannot listen on host '127.0.0.1', port {port}: Address already in use" in result.stderr
            assert "the engine is ready" not in result.stderr


def test_a_bad_chat_template_or_parser_is_told_before_anything_is_loaded(tmp_path):
    (tmp_path / "bad.jinja").write_text("{% for message in messages %}{{ message")
    for option, value, message in (
        ("--chat-template", str(tmp_path / "bad.jinja"), "bad.jinja is not a Jinja template"),
        ("--tool-call-parser", "hermess", 'tool_call_parser is "hermess"'),
    ):
        result = run_command("smollm2-135m", "--port", "0", option, value)
        assert result.returncode == 2
        assert message in result.stderr
        assert "loading" not in result.stderr


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path):
    before = psutil.Process().children(recursive=True)
    result = run_command(str(tmp_path / "nothing"), "--port", "0")
    assert result.returncode == 2
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "nothing" in error
    assert "Traceback" not in result.stderr
    assert set(psutil.Process().children(recursive=True)) <= set(before)
