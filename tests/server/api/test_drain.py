"""Draining by an operator."""

import httpx
import pytest
from streaming_client import Streaming

from jaxllm.server.api.drain import Drain
from jaxllm.server.api.errors import ApiError
from jaxllm.server.board import Board, Phase


def test_requests_are_counted_while_they_are_answered():
    board = Board(2)
    first, second = Drain(board, 0), Drain(board, 1)
    with first.request(), second.request(), second.request():
        assert (first.num_active, second.num_active, board.total_active) == (1, 2, 3)
    assert board.total_active == 0


def test_a_request_that_raises_is_not_counted_any_more():
    drain = Drain()
    with pytest.raises(ZeroDivisionError), drain.request():
        _ = 1 / 0
    assert drain.num_active == 0


def test_draining_refuses_new_requests_in_all_workers_until_it_ends():
    board = Board(2)
    first, second = Drain(board, 0), Drain(board, 1)
    with second.request():
        first.start()
        assert second.is_draining
        with pytest.raises(ApiError, match="draining and takes no new requests") as error, second.request():
            pass
        assert error.value.status == 503
        assert error.value.headers["retry-after"] == "5"
        assert second.num_active == 1
        second.end()
        with first.request():
            assert not first.is_draining


@pytest.mark.parametrize("phase", [Phase.SHUTTING_DOWN, Phase.STOPPING])
def test_a_shutdown_cannot_be_taken_back(phase):
    drain = Drain()
    drain.board.phase = phase
    for change in (drain.start, drain.end):
        with pytest.raises(ApiError, match="cannot be taken back"):
            change()
    assert drain.board.phase is phase


def test_a_board_in_a_file_is_one_board(tmp_path):
    first, second = Board(3, tmp_path / "board"), Board(3, tmp_path / "board")
    second.set_worker(2, serves=True, num_active=7)
    second.log_level = 10
    second.phase = Phase.DRAINING
    assert (first.num_serving, first.total_active, first.log_level, first.phase) == (1, 7, 10, Phase.DRAINING)
    assert not first.is_serving


def test_an_operator_drains_and_takes_it_back(start_stub, admin_headers):
    server = start_stub()
    with httpx.Client(base_url=server.url) as client:
        streaming = Streaming(server.url, 20)
        streaming.wait_until_begun()
        answer = client.post("/admin/drain", headers=admin_headers)
        assert answer.json() == {"draining": True, "num_active": 1}
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["draining"] is True
        for path, body in (
            ("/v1/completions", {"model": "stub", "prompt": "a"}),
            ("/v1/chat/completions", {"model": "stub", "messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"model": "stub", "input": "a"}),
            ("/v1/messages", {"model": "stub", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 503, path
            assert refused.headers["retry-after"] == "5"
        assert client.get("/v1/models").status_code == client.get("/health").status_code == 200
        streaming.assert_complete()
        assert client.post("/admin/undrain", headers=admin_headers).json() == {"draining": False, "num_active": 0}
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/completions", json={"model": "stub", "prompt": "a"}).status_code == 200
