"""What becomes of API workers that die."""

import time

import pytest
from dying_worker import DyingWorker

from jaxllm import JaxLLMError
from jaxllm.server.board import Board
from jaxllm.server.http import worker_process
from jaxllm.server.http.worker_process import WorkerProcess

PATIENCE_S = 30.0


@pytest.fixture
def make_process(tmp_path):
    made = []

    def make(*, serves: bool) -> tuple[WorkerProcess, Board]:
        board = Board(1, tmp_path / "board")
        made.append(WorkerProcess(DyingWorker(tmp_path / "board", serves), "/engine", board))
        return made[-1], board

    yield make
    for process in made:
        process.end(PATIENCE_S)


def test_one_that_never_served_is_not_started_again(make_process, tmp_path):
    process, _ = make_process(serves=False)
    process.end(PATIENCE_S)
    with pytest.raises(JaxLLMError, match="API worker 0 ended with code 7 before it could serve"):
        process.keep()
    assert (tmp_path / "lives").read_text() == "/engine\n"


def test_one_that_dies_again_and_again_is_started_ever_more_seldom(make_process, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_process, "_SECOND_PAUSE_S", 0.2)
    monkeypatch.setattr(worker_process, "_LONGEST_PAUSE_S", 0.4)
    process, _ = make_process(serves=True)
    deadline = time.monotonic() + PATIENCE_S
    num_looks = 0
    while len((tmp_path / "lives").read_text().split() if num_looks else ()) < 5:
        assert time.monotonic() < deadline
        process.end(PATIENCE_S)
        process.keep()
        num_looks += 1
        time.sleep(0.01)
    pauses = [record.args[-1] for record in caplog.records if record.name == "jaxllm.server"]
    assert pauses[:4] == [0, 0.2, 0.4, 0.4]
    assert num_looks > 20, "it waits in between"


def test_a_long_life_is_forgiven(make_process, monkeypatch, caplog):
    monkeypatch.setattr(worker_process, "_LONG_LIFE_S", 0.0)
    process, board = make_process(serves=True)
    for _ in range(3):
        process.end(PATIENCE_S)
        process.keep()  # notes the death
        assert (board.num_serving, board.total_active) == (0, 0)
        time.sleep(0.02)
        process.keep()  # starts it again
    assert [record.args[-1] for record in caplog.records if record.name == "jaxllm.server"] == [0] * 3


def test_what_has_not_served_yet_is_not_waited_for(make_process):
    process, board = make_process(serves=False)
    assert process.is_alive  # It is starting, which takes an interpreter its time.
    assert not process.may_have_requests
    board.set_worker(0, serves=True, num_active=0)
    assert process.may_have_requests or not process.is_alive
