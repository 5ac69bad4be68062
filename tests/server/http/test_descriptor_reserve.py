"""More connections than there are file descriptors."""

import logging
import os
import resource
import time
from contextlib import ExitStack

import httpx
import pytest
from raw_http import connect, read_all

from jaxllm.server.http import worker
from jaxllm.server.http.descriptor_reserve import DescriptorReserve

GET = b"GET %b HTTP/1.1\r\nhost: test\r\n\r\n"


@pytest.fixture
def crowded(start_stub, monkeypatch):
    """A server that takes all descriptors from 200 above those that are open now for its last ones."""
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 200
    monkeypatch.setattr(worker, "DescriptorReserve", lambda on_refusal: DescriptorReserve(on_refusal, limit=limit))
    return start_stub()


def refused_connections(server) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("jaxllm:refused_connections_total")]
    return float(line.split()[-1])


def test_probes_are_answered_when_descriptors_are_short(crowded, caplog):
    caplog.set_level(logging.ERROR, logger="jaxllm.server")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
    with ExitStack() as stack:
        for _ in range(300):  # each has a descriptor at both of its ends, which are in this process
            stack.enter_context(connect(crowded.url))
        for path in ("/health", "/ready", "/metrics"):
            with connect(crowded.url) as client:
                client.sendall(GET % path.encode())
                answer = read_all(client)  # It is closed after the answer.
                assert answer.startswith(b"HTTP/1.1 200 OK"), answer
                assert b"connection: close" in answer
        with connect(crowded.url) as client:
            client.sendall(GET % b"/v1/models")
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in answer
        assert refused_connections(crowded) >= 1
    assert caplog.text.count("file descriptors are short") == 1
    crowded.wait_for(lambda: httpx.get(crowded.url + "/v1/models").status_code == 200)


def test_who_holds_a_last_descriptor_in_silence_loses_it(crowded):
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(crowded.url)) for _ in range(300)]
        start = time.monotonic()
        assert clients[-1].recv(1000) == b""
        assert time.monotonic() - start < 8
        clients[0].sendall(GET % b"/v1/models")
        assert clients[0].recv(1000).startswith(b"HTTP/1.1 200 OK"), "others are left alone"


def test_the_reserve_is_never_full():
    aborted = []

    class Transport:
        def __init__(self, number: int) -> None:
            self.number = number

        def get_extra_info(self, name: str) -> "Transport":
            assert name == "socket"
            return self

        def fileno(self) -> int:
            return self.number

        def abort(self) -> None:
            aborted.append(self.number)

    refused = []
    reserve = DescriptorReserve(lambda: refused.append(1), limit=1024)
    assert not reserve.holds(Transport(959))
    for number in range(960, 1000):
        assert reserve.holds(Transport(number))
    assert aborted == list(range(960, 968))
    assert len(refused) == 8
