"""What operators of other servers report: an engine that dies or hangs, and clients that do what they should not."""

import os
import signal
import threading
import time

import httpx
import pytest
from raw_http import connect, post
from streaming_client import Streaming

WATCHDOG_S = 1.0


def test_an_engine_that_is_killed_ends_its_requests_and_comes_back(start_stub):
    server = start_stub()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        streams = [Streaming(server.url, 1000) for _ in range(8)]
        whole: list[httpx.Response] = []
        body = {"model": "stub", "prompt": "!slow", "max_tokens": 1000}
        threads = [
            threading.Thread(target=lambda: whole.append(client.post("/v1/completions", json=body))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for stream in streams:
            stream.wait_until_begun()
        server.wait_for(lambda: server.llm.stats.scheduler.num_running == 12)

        os.kill(server.process.pid, signal.SIGKILL)
        for stream in streams:
            stream.wait()
            assert stream.error is None, "the stream must end by itself"
            assert stream.chunks[-1]["error"]["type"] == "server_error"
            assert not any(choice["finish_reason"] for c in stream.chunks[:-1] for choice in c["choices"])
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in whole] == [503] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in whole)
        assert server.board.total_active == 0

        server.wait_for(lambda: client.get("/ready").status_code == 200, timeout_s=30)
        assert server.process.num_restarts == 1
        stream = Streaming(server.url, 5)
        stream.assert_complete()
        server.wait_until_idle()


def test_ready_says_that_the_engine_is_restarting_and_requests_are_told_503(start_stub):
    server = start_stub(engine="stub_engine:SlowRestartEngine")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/ready").status_code == 200
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait_for(lambda: client.get("/ready").status_code == 503)
        answer = client.get("/ready")
        assert answer.json()["engine"] == "restarting"
        assert answer.json()["reason"] == "the engine is restarting"
        start = time.monotonic()
        refused = client.post("/v1/completions", json={"model": "stub", "prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert time.monotonic() - start < 1, "it must be told at once"
        assert client.get("/health").status_code == 200
        server.wait_for(lambda: client.get("/ready").status_code == 200, timeout_s=30)


def test_a_request_that_kills_the_engine_does_not_keep_it_down(start_stub):
    server = start_stub()
    stream = Streaming(server.url, 5, prompt="!die")
    stream.wait()
    assert stream.status == 503 or "error" in stream.chunks[-1]
    server.wait_for(lambda: httpx.get(server.url + "/ready").status_code == 200, timeout_s=30)
    Streaming(server.url, 5).assert_complete()


def test_an_engine_that_is_stuck_is_not_ready_within_the_watchdogs_time(start_stub):
    server = start_stub(watchdog_s=WATCHDOG_S)
    with httpx.Client(base_url=server.url, timeout=10) as client:
        assert client.get("/ready").status_code == 200
        stuck = Streaming(server.url, 5, prompt="!hang")
        server.wait_for(lambda: server.board.total_active == 1)
        start = time.monotonic()
        server.wait_for(lambda: client.get("/ready").status_code == 503, timeout_s=WATCHDOG_S + 1)
        assert time.monotonic() - start > WATCHDOG_S / 2
        answer = client.get("/ready").json()
        assert "the engine was last heard of" in answer["reason"]
        assert answer["heartbeat_age_s"] > WATCHDOG_S
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/metrics").status_code == client.get("/load").status_code == 200
        os.kill(server.process.pid, signal.SIGKILL)  # as an operator, or a liveness probe of theirs, would
        stuck.wait()
        server.wait_for(lambda: client.get("/ready").status_code == 200, timeout_s=30)


def test_an_engine_that_is_stuck_holds_no_request_beyond_its_time(start_stub):
    server = start_stub(request_timeout_s=1.0)
    begun = Streaming(server.url, 5, prompt="a!hang")  # its first step never returns
    server.wait_for(lambda: server.llm.heartbeat_age_s > 0.3)
    start = time.monotonic()
    body = {"model": "stub", "prompt": "a"}
    late = httpx.post(server.url + "/v1/completions", json=body, headers={"X-Queue-Timeout-S": "0.5"}, timeout=10)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
    assert 0.4 < time.monotonic() - start < 5
    begun.wait()
    assert begun.status == 503
    assert '"code":"queue_timeout"' in begun.lines[-1]
    server.wait_for(lambda: server.board.total_active == 0)


def test_a_steady_engine_is_ready_under_load(start_stub):
    server = start_stub(watchdog_s=WATCHDOG_S)
    streams = [Streaming(server.url, 40) for _ in range(4)]
    with httpx.Client(base_url=server.url) as client:
        while any(not stream.lines or stream.lines[-1] != "[DONE]" for stream in streams):
            assert client.get("/ready").status_code == 200
            time.sleep(0.05)
    for stream in streams:
        stream.assert_complete()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 1_000_000, "n"),
        ("n", 0, "n"),
        ("n", 10**30, "n"),
        ("max_tokens", 10**9, "max_tokens"),
        ("max_tokens", 2048, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("prompt", "a" * 5000, "2,048"),
        ("prompt", [1, 2, 300], "300"),
        ("prompt", [[1], [-5]], "-5"),
        ("prompt", [], "prompt"),
        ("temperature", -1, "temperature"),
        ("logprobs", 1000, "logprobs"),
        ("stop", [""], "stop"),
    ],
)
def test_what_cannot_be_served_is_told_400_by_name(stub_server, field, value, message):
    body = {"model": "stub", "prompt": "abc", "max_tokens": 3, field: value}
    answer = httpx.post(stub_server.url + "/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_queue_that_is_full_is_told_429_at_once(start_stub):
    server = start_stub(engine_options={"max_num_seqs": 1, "max_queued_requests": 2})
    streams = [Streaming(server.url, 30)]
    server.wait_for(lambda: server.llm.stats.scheduler.num_running == 1)
    streams += [Streaming(server.url, 30) for _ in range(2)]
    server.wait_for(lambda: server.llm.stats.scheduler.num_waiting == 2)
    start = time.monotonic()
    answer = httpx.post(server.url + "/v1/completions", json={"model": "stub", "prompt": "a"})
    assert time.monotonic() - start < 1
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    for stream in streams:
        stream.assert_complete()


def test_a_client_that_reads_a_byte_a_second_does_not_slow_the_others(start_stub):
    server = start_stub()

    def seconds_of_a_request() -> float:
        start = time.monotonic()
        body = {"model": "stub", "prompt": "abc", "max_tokens": 200, "stream": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        assert answer.text.rstrip().endswith("[DONE]")
        return time.monotonic() - start

    alone = min(seconds_of_a_request() for _ in range(3))
    stopped = threading.Event()

    def read_slowly() -> None:
        with connect(server.url, receive_buffer=2048) as client:
            body = {"model": "stub", "prompt": "abc", "max_tokens": 2000, "stream": True, "logprobs": 5}
            client.sendall(post("/v1/completions", body))
            while not stopped.wait(1.0):
                client.recv(1)

    threads = [threading.Thread(target=read_slowly) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        server.wait_for(lambda: server.board.total_active == 5)
        beside = min(seconds_of_a_request() for _ in range(3))
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert beside < 3 * alone + 0.5  # five more rows in each step, and their tokens: not a second for each byte
    server.wait_until_idle(timeout_s=30)
    server.wait_for(lambda: server.board.total_active == 0)
