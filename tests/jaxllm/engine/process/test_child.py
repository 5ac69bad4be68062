"""The engine's process, its owner and its clients, and what each does when another fails; without JAX."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from stream_reading import collect

from jaxllm import AsyncLLM, EngineConfig, EngineProcess, SamplingParams
from jaxllm.engine.process.messages import Refused
from jaxllm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    JaxLLMError,
    ModelNotFoundError,
    OverloadedError,
)
from jaxllm.scheduler import RequestStatus

SERVER_TESTS = str(Path(__file__).parents[3] / "server")  # where the engine without JAX is

STUB = "stub_engine:StubEngine"
FREE = "stub_engine:FreeStepEngine"
PATIENCE_S = 30.0  # on a busy machine


class Rig:
    """A process, and an event loop with clients of it."""

    def __init__(self, folder, engine=STUB, **options):
        self.runner = asyncio.Runner()
        self.process = EngineProcess(EngineConfig(model=str(folder), **options), engine=engine)
        self.process.start()
        self.llms = []
        self.llm = self.connect()

    def run(self, coroutine, timeout_s=PATIENCE_S):
        return self.runner.run(asyncio.wait_for(coroutine, timeout_s))

    def connect(self):
        self.llms.append(self.run(AsyncLLM.connect(self.process.address)))
        return self.llms[-1]

    async def answer(self, text, max_tokens=10, llm=None, **options):
        """(text, finish_reason, error) of a request."""
        llm = llm or self.llm
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        stream = await llm.submit(llm.tokenizer.encode(text), params, **options)
        [delta] = await collect(stream)
        return delta.text, delta.finish_reason, delta.error

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.01)

    async def until_idle(self):
        """The engine says that nothing runs, in a heartbeat sent from now on."""
        now = time.monotonic()

        def is_idle():
            stats = self.llm.stats
            return stats.time > now and not (stats.scheduler.num_running or stats.scheduler.num_waiting)

        await self.until(is_idle)
        assert self.llm.stats.scheduler.num_used_pages == 0

    def close(self):
        for llm in self.llms:
            self.run(llm.close())
        self.process.stop(timeout_s=PATIENCE_S)
        self.runner.close()
        assert self.process.pid is None


@pytest.fixture(scope="module")
def _rig(tiny_folder):
    rig = Rig(tiny_folder)
    yield rig
    rig.close()


@pytest.fixture
def rig(_rig):
    """32 rows, 2 ms a step. To be left serving and idle."""
    yield _rig
    assert _rig.run(_rig.answer("abc")) == ("abcabcabca", "length", None)
    _rig.run(_rig.until_idle())
    client = _rig.llm._client
    assert (_rig.llm._outputs.keys, client._submits, client._questions) == ([], {}, {})


@pytest.fixture
def make_rig(tiny_folder):
    with contextlib.ExitStack() as stack:

        def make(engine=STUB, **options):
            rig = Rig(tiny_folder, engine, **options)
            stack.callback(rig.close)
            return rig

        yield make


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# Requests


def test_requests_run_together_and_each_stream_has_its_own(rig):
    async def check():
        texts = [f"{number}-" for number in range(50)]
        answers = await asyncio.gather(*(rig.answer(text, max_tokens=40) for text in texts))
        for text, (answered, reason, _) in zip(texts, answers, strict=True):
            assert answered == (text * 40)[:40]
            assert reason == "length"

    rig.run(check())


def test_a_refused_request_is_an_error_and_the_next_one_is_served(rig):
    async def check():
        with pytest.raises(InvalidRequestError, match=r"'the name'.*2,048 tokens; max_model_len is 2,048"):
            await rig.llm.submit([5] * 2048, SamplingParams(), request_id="the name")
        for wrong in ([5, 1.5], [5, True], ["a"], [None]):
            with pytest.raises(InvalidRequestError, match="as a token id; it must be an integer"):
                await rig.llm.submit(wrong, SamplingParams())
        for wrong in ([2**70], [-1], []):
            with pytest.raises(InvalidRequestError):
                await rig.llm.submit(wrong, SamplingParams())
        with pytest.raises(JaxLLMError, match="the engine raised RuntimeError: a defect in add_request"):
            await rig.answer("!refuse")

    rig.run(check())


def test_a_full_queue_is_an_error_of_its_own(make_rig):
    rig = make_rig(max_num_seqs=1, max_queued_requests=2)

    async def check():
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        streams = [await rig.llm.submit([5], params)]
        await rig.until(lambda: rig.llm.stats.scheduler.num_running)
        streams += [await rig.llm.submit([5], params) for _ in range(2)]
        with pytest.raises(OverloadedError, match="max_queued_requests is 2"):
            await rig.llm.submit([5], params)
        with pytest.raises(OverloadedError):  # All continuations are taken, or none.
            await rig.llm.submit([5], SamplingParams(max_tokens=5, n=3))
        for stream in streams:
            await stream.aclose()
        await rig.until_idle()

    rig.run(check())


def test_the_reasons_of_an_end_arrive(rig):
    async def check():
        assert (await rig.answer("ab!slow", max_tokens=2000, timeout_s=0.2))[1] == "timeout"
        assert (await rig.answer("!say:hello[assistant]", max_tokens=50))[0].startswith("hello")
        aborted = asyncio.ensure_future(rig.answer("ab!slow", max_tokens=2000, request_id="a"))
        await asyncio.sleep(0.1)
        assert await rig.llm.abort("a")
        assert (await aborted)[1] == "abort"
        assert not await rig.llm.abort("a")

    rig.run(check())


def test_a_request_of_another_client_can_be_aborted_by_its_name(rig):
    async def check():
        other = await AsyncLLM.connect(rig.process.address)
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        streams = [await llm.submit([5], params, request_id="same") for llm in (rig.llm, other, other)]
        assert await rig.llm.abort("same")
        for stream in streams:
            assert (await collect(stream))[0].finish_reason == "abort"
        await other.close()

    rig.run(check())


# Readers


def test_a_reader_who_leaves_takes_the_request_along(rig):
    params = SamplingParams(max_tokens=2000, ignore_eos=True, n=3)

    async def leave(how):
        streams = [await rig.llm.submit(rig.llm.tokenizer.encode("ab!slow"), params)]  # for 100 s
        await anext(streams[0])
        await how(streams)
        await rig.until_idle()

    async def cancel(streams):
        async def read():
            async for _ in streams[0]:
                pass

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    async def close_for_another(streams):
        reader = asyncio.ensure_future(collect(streams[0]))
        await asyncio.sleep(0.05)
        await streams[0].aclose()
        assert not any(delta.finish_reason for delta in await reader)

    async def forget(streams):
        streams.clear()
        gc.collect()

    for how in (cancel, close_for_another, forget):
        rig.run(leave(how))


def test_a_submit_that_is_cancelled_leaves_nothing_behind(rig):
    async def check():
        for delay_s in (0.0, 0.001, 0.003):
            submit = asyncio.ensure_future(rig.llm.submit([5, 6], SamplingParams(max_tokens=2000, ignore_eos=True)))
            await asyncio.sleep(delay_s)
            submit.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await submit).aclose()
        await rig.until_idle()

    rig.run(check())


def test_a_refusal_that_comes_after_its_submit_was_cancelled_leaves_nothing_behind(rig, monkeypatch):
    client, held = rig.llm._client, []
    hear = client._hear
    monkeypatch.setattr(client, "_hear", lambda m: held.append(m) if isinstance(m, Refused) else hear(m))

    async def check():
        submit = asyncio.ensure_future(rig.llm.submit(rig.llm.tokenizer.encode("!refuse"), SamplingParams()))
        await rig.until(lambda: held)
        submit.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await submit
        assert len(rig.llm._outputs.keys) == 1, "it may still have been taken"
        hear(*held)
        assert not rig.llm._outputs.keys
        assert not client._unheard

    rig.run(check())


def test_what_nobody_reads_merges_and_holds_up_nobody(rig):
    async def check():
        params = SamplingParams(max_tokens=1500, ignore_eos=True)
        unread = await rig.llm.submit(rig.llm.tokenizer.encode("abc"), params)
        assert await rig.answer("xyz", max_tokens=100) == (("xyz" * 40)[:100], "length", None)
        await rig.until(lambda: not unread._num_unfinished)
        assert len(unread._pending[0]) <= 64
        [delta] = [delta async for delta in unread]
        assert delta.text == "abc" * 500
        assert len(delta.token_ids) == 1500

    rig.run(check())


def test_an_event_loop_that_lags_loses_nothing(make_rig):
    """The engine takes no time for a step: what the client does not receive in time merges on the other side."""
    rig = make_rig(FREE)

    async def check():
        answers = [asyncio.ensure_future(rig.answer(f"{number}-", max_tokens=1000)) for number in range(16)]
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(0.02)
            time.sleep(0.1)
        for number, answer in enumerate(answers):
            assert answer.result()[0] == (f"{number}-" * 1000)[:1000]

    rig.run(check())


# Clients


def test_the_requests_of_a_client_that_leaves_end(rig):
    async def check():
        other = await AsyncLLM.connect(rig.process.address)
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        streams = [await other.submit([5, 6, number], params) for number in range(5)]
        await other.close()
        await rig.until_idle()
        for stream in streams:
            assert (await collect(stream))[0].finish_reason == "abort"

    rig.run(check())


def test_the_requests_of_a_client_that_is_killed_end(rig):
    program = f"""
        import asyncio, os, signal
        from jaxllm import AsyncLLM, SamplingParams
        from jaxllm.scheduler import RequestStatus

        async def main():
            llm = await AsyncLLM.connect({rig.process.address!r})
            params = SamplingParams(max_tokens=2000, ignore_eos=True)
            streams = [await llm.submit(llm.tokenizer.encode("ab!slow"), params) for number in range(5)]
            print(llm.stats.scheduler.num_requests[RequestStatus.FINISHED_ABORT], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, check=False)
    assert result.returncode == -signal.SIGKILL
    before = int(result.stdout)
    rig.run(rig.until(lambda: rig.llm.stats.scheduler.num_requests[RequestStatus.FINISHED_ABORT] == before + 5), 5.0)


def test_heartbeats_come_when_idle_and_under_load(rig):
    async def check():
        async def longest_gap(seconds):
            end, longest = time.monotonic() + seconds, 0.0
            while time.monotonic() < end:
                longest = max(longest, rig.llm.heartbeat_age_s)
                await asyncio.sleep(0.01)
            return longest

        before = rig.llm.stats.num_steps
        assert await longest_gap(0.5) < 2.0
        busy = [asyncio.ensure_future(rig.answer("abc", max_tokens=300)) for _ in range(10)]
        assert await longest_gap(0.5) < 2.0
        await asyncio.gather(*busy)
        await rig.until_idle()
        assert rig.llm.stats.num_steps > before

    rig.run(check())


# Faults


def test_a_step_that_raises_ends_only_the_requests_in_it(make_rig):
    rig = make_rig(max_num_seqs=1)

    async def check():
        bad = asyncio.ensure_future(rig.answer("!raise"))
        await asyncio.sleep(0.0)
        good = [asyncio.ensure_future(rig.answer(text)) for text in ("abc", "xyz")]
        text, reason, error = await bad
        assert (text, reason) == ("", "error")
        assert "a defect in step" in error
        answers = await asyncio.gather(*good)
        assert answers == [("abcabcabca", "length", None), ("xyzxyzxyzx", "length", None)]

    rig.run(check())
    assert rig.process.num_restarts == 0


@pytest.mark.parametrize("how", ["killed", "dies"])
def test_a_process_that_dies_ends_its_requests_and_comes_back(make_rig, how):
    rig = make_rig()

    async def check():
        pid = rig.process.pid
        answers = [asyncio.ensure_future(rig.answer("abc", max_tokens=2000)) for _ in range(20)]
        while not rig.llm.stats.scheduler.num_running:
            await asyncio.sleep(0.01)
        died = time.monotonic()
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            answers.append(asyncio.ensure_future(rig.answer("!die")))
        for answer in answers:
            try:
                _, reason, error = await answer
                assert (reason, error) == ("error", "the engine process has ended, or has closed the connection")
            except EngineDeadError:  # It had not been taken in.
                assert how == "dies"
        assert time.monotonic() - died < 10.0
        assert rig.llm.state == "restarting"
        with pytest.raises(EngineDeadError, match="the engine is restarting"):
            await rig.llm.submit([5], SamplingParams())
        await rig.llm.wait_until_ready()
        assert rig.llm.state == "ready"
        assert await rig.answer("abc") == ("abcabcabca", "length", None)
        assert rig.process.num_restarts == rig.llm.num_restarts == 1
        assert rig.process.pid not in (None, pid)

    rig.run(check(), 2 * PATIENCE_S)


def test_a_stuck_engine_is_seen_and_can_be_ended(make_rig):
    rig = make_rig()

    async def check():
        stuck = asyncio.ensure_future(rig.answer("!hang"))
        await rig.until(lambda: rig.llm.heartbeat_age_s > 1.0)
        assert rig.llm.state == "ready"
        assert not stuck.done()
        pid = rig.process.pid
        await asyncio.to_thread(rig.process.stop, 0.2)
        assert not is_alive(pid)
        assert (await stuck)[1] == "error"
        await rig.until(lambda: rig.llm.state == "stopped")  # Its owner will not start it again.
        with pytest.raises(EngineDeadError, match="stopped"):
            await rig.llm.submit([5], SamplingParams())

    rig.run(check())


def test_signals_to_the_group_are_left_to_the_owner(rig):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(rig.process.pid, number)
    assert rig.run(rig.answer("abc"))[0] == "abcabcabca"
    assert rig.process.num_restarts == 0


def test_no_process_outlives_its_owner(tiny_folder):
    """Not even when the owner is killed, and left a child that holds all of its files open."""
    program = f"""
        import asyncio, os, signal, sys
        sys.path.append({SERVER_TESTS!r})
        from jaxllm import AsyncLLM, EngineConfig, EngineProcess

        process = EngineProcess(EngineConfig(model={str(tiny_folder)!r}), engine={STUB!r})
        process.start()
        asyncio.run(AsyncLLM.connect(process.address))
        child = os.fork()
        if child == 0:
            os.closerange(0, 3)
            signal.pause()
        mode = process.folder.stat().st_mode & 0o777
        print(process.pid, child, oct(mode), process.folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == -signal.SIGKILL
    pid, child, mode, folder = result.stdout.split()
    end = time.monotonic() + PATIENCE_S
    while is_alive(int(pid)) and time.monotonic() < end:
        time.sleep(0.05)
    outlived = is_alive(int(pid))
    assert is_alive(int(child))
    os.kill(int(child), signal.SIGKILL)
    assert not outlived
    assert mode == "0o700"
    assert not Path(folder).exists()


def test_an_engine_that_cannot_start_says_why_and_is_not_tried_again(tmp_path):
    async def connect(engine, model):
        process = EngineProcess(EngineConfig(model=model), engine=engine)
        process.start()
        try:
            await asyncio.wait_for(AsyncLLM.connect(process.address), PATIENCE_S)
        finally:
            for _ in range(100):
                await asyncio.sleep(0.3 if process.pid is None else 0.1)
                if process.pid is None:
                    break
            assert process.num_restarts == 0
            assert process.pid is None
            process.stop()

    with pytest.raises(EngineDeadError, match="the engine raised ModuleNotFoundError: No module named 'nowhere'"):
        asyncio.run(connect("nowhere:Engine", str(tmp_path)))
    with pytest.raises(EngineDeadError, match="has no attribute 'Engine'"):
        asyncio.run(connect("stub_engine:Engine", str(tmp_path)))
    with pytest.raises(EngineDeadError, match="the engine process ended with code -9 before it could serve"):
        asyncio.run(connect("stub_engine:DyingAtStartEngine", str(tmp_path)))
    with pytest.raises(ModelNotFoundError, match=r"no model '\./nowhere'"):
        asyncio.run(connect("jaxllm.engine.start:start_core", "./nowhere"))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5000", "relative", "", "/" + "x" * 100])
def test_an_address_must_be_an_absolute_path_that_is_short_enough(address):
    with pytest.raises(ConfigError, match=r"the address of the engine process is .* at most 100 bytes"):
        EngineProcess(EngineConfig(model="m"), address=address)


def test_a_connection_to_nobody_ends_when_the_owner_goes(tmp_path):
    async def check():
        folder = tmp_path / "gone"
        folder.mkdir()
        connecting = asyncio.ensure_future(AsyncLLM.connect(f"{folder}/core"))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        folder.rmdir()
        with pytest.raises(EngineDeadError, match="was stopped by its owner"):
            await connecting

    asyncio.run(check())
