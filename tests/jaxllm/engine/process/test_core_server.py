"""How a core deals with clients that do not do what they should; in one process, without JAX."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
from said_options import SAID
from stream_reading import collect
from stub_engine import StubEngine

from jaxllm import AsyncLLM, EngineConfig, SamplingParams
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.process import server as core_server
from jaxllm.engine.process.child import listen
from jaxllm.engine.process.frame_socket import FrameSocket
from jaxllm.engine.process.messages import Ack, Submit, Taken, Tokens, decode_to_client, encode
from jaxllm.engine.process.server import CoreServer

PATIENCE_S = 30.0  # on a busy machine


@pytest.fixture
def make_server(tiny_folder, tmp_path):
    """The address of a server that runs within the context. It must end without a client or a request."""

    @contextmanager
    def make(engine=StubEngine):
        address, ended = str(tmp_path / "core"), threading.Event()
        server = CoreServer(engine(EngineConfig(model=str(tiny_folder))), listen(address), ended.is_set)
        with ThreadPoolExecutor() as executor:
            running = executor.submit(server.run)
            try:
                yield address
                deadline = time.monotonic() + PATIENCE_S
                while (server._clients or server._owners) and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert not server._clients
                assert not server._owners
                assert not server._core.has_unfinished_requests
            finally:
                ended.set()
                running.result()
                server.close()

    return make


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def answer(llm):
    [delta] = await collect(await llm.submit([5, 6], SamplingParams(max_tokens=5, ignore_eos=True)))
    return delta.token_ids


def test_every_option_of_a_request_arrives_said_whole_or_by_name(make_server):
    heard = []

    class ListeningEngine(StubEngine):
        def add_request(self, request):
            heard.append(request.options)
            super().add_request(request)

    async def check(address):
        llm = await AsyncLLM.connect(address)
        params = SamplingParams(max_tokens=2)
        await collect(await llm.submit([5], params, SAID))
        await collect(await llm.submit([5], params, **asdict(SAID)))
        await collect(await llm.submit([5], params, SAID, priority=4))
        await llm.close()
        assert heard == [SAID, SAID, replace(SAID, priority=4)]

    with make_server(ListeningEngine) as address:
        run(check(address))


def test_a_client_that_was_frozen_too_long_is_told_and_begins_anew(make_server, monkeypatch):
    monkeypatch.setattr(core_server, "_MAX_SILENT_BEATS", 5)

    async def check(address):
        llm = await AsyncLLM.connect(address)
        stream = await llm.submit(llm.tokenizer.encode("ab!slow"), SamplingParams(max_tokens=2000))
        time.sleep(1.5)
        [delta] = await collect(stream)
        assert delta.finish_reason == "error"
        assert delta.error == "the engine process has ended, or has closed the connection"
        await llm.wait_until_ready()
        assert await answer(llm) == [5, 6, 5, 6, 5]
        await llm.close()

    with make_server() as address:
        run(check(address))


def test_a_client_is_not_held_to_be_gone_after_a_step_that_was_long(make_server, monkeypatch):
    """It could not be heard meanwhile."""

    class LongStepEngine(StubEngine):
        def step(self):
            time.sleep(0.5)
            return super().step()

    monkeypatch.setattr(core_server, "_MAX_SILENT_BEATS", 4)  # 0.4 s

    async def check(address):
        llm = await AsyncLLM.connect(address)
        assert await answer(llm) == [5, 6, 5, 6, 5]
        await llm.close()

    with make_server(LongStepEngine) as address:
        run(check(address))


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\x02\xff\xff",
        b"\0\0\0\x06\x92\xa3Ack\xc0",
        b"\0\0",
    ],
)
def test_noise_on_the_socket_ends_its_connection_and_disturbs_nobody(make_server, noise):
    async def check(address):
        llm = await AsyncLLM.connect(address)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address)
            stranger.sendall(noise)
            assert await answer(llm) == [5, 6, 5, 6, 5]
            if len(noise) >= 4:
                stranger.settimeout(PATIENCE_S)
                await asyncio.to_thread(_read_to_the_end, stranger)
        assert await answer(llm) == [5, 6, 5, 6, 5]
        await llm.close()

    with make_server() as address:
        run(check(address))


def _read_to_the_end(stream):
    try:
        while stream.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass


def test_a_request_longer_than_the_sockets_buffer_arrives_while_steps_are_done(make_server):
    async def check(address):
        llm = await AsyncLLM.connect(address)
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        running = await llm.submit(llm.tokenizer.encode("ab"), params)
        long = await llm.submit([5, 6], params, cache_salt="salt" * 1_000_000)
        assert llm.num_restarts == 0
        for stream in (running, long):
            [delta] = await collect(stream)
            assert len(delta.token_ids) == 500
        await llm.close()

    with make_server() as address:
        run(check(address))


def test_a_client_that_does_not_confirm_is_sent_no_more_and_what_is_new_merges(tiny_folder, tmp_path):
    class SilentEngine(StubEngine):
        """Has requests, and is never to do a step."""

        has_unfinished_requests = False

    address = str(tmp_path / "core")
    server = CoreServer(SilentEngine(EngineConfig(model=str(tiny_folder))), listen(address), lambda: False)
    client = FrameSocket.connect(address)

    def say(message):
        client.send(encode(message))
        server._listen()
        return heard()

    def heard():
        return [decode_to_client(frame) for frame in client.receive()]

    server._next_beat = time.monotonic() + PATIENCE_S
    server._listen()  # the connection
    [*_, taken] = say(Submit([1], [None], CoreRequest(request_id="r", prompt_token_ids=[1])))
    assert taken == Taken(1)
    for token_id in range(20):
        server._report(CoreOutput(keys=["r"], token_ids=[token_id]))
    tokens = heard()
    assert all(isinstance(message, Tokens) for message in tokens)
    assert [message.output.token_ids for message in tokens] == [[0], [1], [2], [3]]
    [more] = say(Ack(tokens[0].number))
    assert more.output.token_ids == list(range(4, 20))
    client.close()
    server.close()
