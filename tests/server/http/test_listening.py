"""The port, from the first moment to the last: who owns it, and who answers."""

import socket
import time
from collections import Counter

import httpx

ANSWER_S = 2.0  # A connection that nobody takes would wait for seconds.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status(url: str) -> int | None:
    """On a connection of its own; None if it was reset, as by a worker that was killed with it."""
    try:
        return httpx.get(url, timeout=ANSWER_S).status_code
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return None


def test_a_port_has_one_server_also_while_it_loads(run_serve):
    port = free_port()
    first = run_serve(engine="stub_engine:SlowStartEngine", port=port, wait=False)
    url = f"http://127.0.0.1:{port}"
    first.wait_for(lambda: any("loading" in line for line in first.lines))
    for path in ("/health", "/ready", "/v1/models"):
        answer = httpx.get(url + path, timeout=ANSWER_S)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "starting"
    answer = httpx.post(url + "/v1/messages", content=b"a" * 1_000_000, timeout=ANSWER_S)
    assert (answer.status_code, answer.json()["type"]) == (503, "error")
    for workers in (1, 2):
        second = run_serve(port=port, api_workers=workers, wait=False)
        assert second.process.wait(30) != 0
        second.wait()
        log = "".join(second.lines)
        assert f"cannot listen on host '127.0.0.1', port {port}: Address already in use" in log
        assert "loading" not in log


def test_new_connections_are_answered_while_workers_are_down(run_serve):
    server = run_serve(api_workers=2)
    workers = server.find_workers()
    workers[0].kill()
    for _ in range(30):
        assert status(server.url + "/health") in (200, None)
        time.sleep(0.02)
    server.wait_for(lambda: sum("starts again in 0 s" in line for line in server.lines) == 1)
    server.wait_for(lambda: len(server.find_workers()) == 2)
    for worker in server.find_workers():
        worker.kill()
    seen = Counter(status(server.url + "/health") for _ in range(10))
    server.wait_for(lambda: status(server.url + "/health") == 200, timeout_s=60)
    assert seen[503] >= 5, f"somebody answers while all are down, but it was {seen}"
    server.wait_for(lambda: len(server.find_workers()) == 2)
