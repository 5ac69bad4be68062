"""That the commands of a step are all that a second runner needs, wherever and whenever it runs."""

import time

import numpy as np
import pytest
from tiered_engine import converse, tiered_llm, write_model

from jaxllm import SamplingParams
from jaxllm.engine.process.messages import decode_command, encode_command
from jaxllm.engine.step_command import StepCommand
from jaxllm.scheduler import PageMoves
from jaxllm.scheduler.buckets import Bucket

PARAMS = [
    SamplingParams(temperature=number % 2, seed=number, max_tokens=12, ignore_eos=True, logprobs=2)
    for number in range(6)
]


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    """Two of the same model."""
    folder = write_model("gemma3", tmp_path_factory.mktemp("followed"))
    llms = tiered_llm(folder), tiered_llm(folder)
    yield llms
    for llm in llms:
        llm.engine.shutdown()


def record(runner, monkeypatch):
    """(command as bytes, handle of the step or None) of all that the runner launches from now on."""
    launch, records = runner.launch, []

    def recording(command):
        data = encode_command(command)
        records.append((data, launch(command)))
        return records[-1][1]

    monkeypatch.setattr(runner, "launch", recording)
    return records


def test_a_runner_that_gets_the_same_bytes_has_the_same_caches_and_results(llms, monkeypatch):
    """With pages that go to the host and come back; one copy in three fails there, and half of them are slow here."""
    first, second = llms
    mover, num_calls = first.engine.runner._mover, 0
    get = mover._get

    def fail_at_times(slots):
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise MemoryError("no room")
        return get(slots)

    monkeypatch.setattr(mover, "_get", fail_at_times)
    records = record(first.engine.runner, monkeypatch)
    converse(first, PARAMS, num_turns=3)
    commands = [decode_command(data) for data, _ in records]
    assert sum(bool(pages) for command in commands for _, pages in command.moves.writes) > 10
    assert any(not pages for command in commands for _, pages in command.moves.writes)
    assert sum(len(command.moves.saves) for command in commands) > 30
    assert len({command.bucket for command in commands}) > 2

    follower = second.engine.runner
    own_get = follower._mover._get
    monkeypatch.setattr(follower._mover, "_get", lambda slots: time.sleep(0.02 * (slots[0] % 2)) or own_get(slots))
    for command, (_, handle) in zip(commands, records, strict=True):
        followed = follower.launch(command)
        assert (followed is None) == (handle is None)
        if handle is not None:
            num_seqs = command.bucket.num_seqs
            np.testing.assert_array_equal(followed.sampled(num_seqs).token_ids, handle.sampled(num_seqs).token_ids)
            for its, ours in zip(followed.logprobs(), handle.logprobs(), strict=True):
                np.testing.assert_array_equal(its, ours)
    runner = first.engine.runner
    for its, ours in zip(follower._kv_pages, runner._kv_pages, strict=True):
        np.testing.assert_array_equal(np.asarray(its), np.asarray(ours))
    for its, ours in zip(follower._state, runner._state, strict=True):
        np.testing.assert_array_equal(np.asarray(its), np.asarray(ours))


def test_pages_that_a_follower_could_not_copy_stop_it(llms):
    runner = llms[1].engine.runner
    slot = runner.num_host_pages - 1
    runner.launch(StepCommand(PageMoves([], [], [(0, [slot])])))  # Nothing was saved there.
    with pytest.raises(RuntimeError, match=rf"pages could not be copied from the host: .* host slots \[{slot}\]"):
        runner.launch(StepCommand(PageMoves([(0, [5])], [], [])))


def test_a_command_is_the_same_after_its_way():
    moves = PageMoves([(1, [4, 5]), (2, [])], [(6, 7)], [(3, [8, 9])])
    command = StepCommand(moves, Bucket.mixed(64, 4), np.arange(-3, 30, dtype=np.int32))
    again = decode_command(encode_command(command))
    assert again[:2] == command[:2]
    np.testing.assert_array_equal(again.buffer, command.buffer)
    assert decode_command(encode_command(StepCommand(moves))) == StepCommand(moves)
    assert command
    assert StepCommand(moves)
    assert not StepCommand(PageMoves([], [], []))
