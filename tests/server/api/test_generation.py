"""One prompt on its way: how it ends, and that its end is told once. The engine is a script."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from jaxllm import OutputDelta, RequestMetrics, RequestOptions, SamplingParams
from jaxllm.server.api.call import Call
from jaxllm.server.api.drain import Drain
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.generation.client_watch import ClientLeftError
from jaxllm.server.api.generation.deltas import deltas, gather
from jaxllm.server.api.generation.generation import Generation
from jaxllm.server.api.generation.generation_group import GenerationGroup
from jaxllm.server.api.keys import Caller
from jaxllm.server.board import Phase
from jaxllm.server.server_config import ServerConfig

STARTED = RequestMetrics(arrival_time=0.0, first_scheduled_time=1.0, first_token_time=2.0, num_cached_tokens=3)
NEVER_STARTED = RequestMetrics(arrival_time=0.0)


def delta(index: int = 0, text: str = "a", token_ids=(1,), **options) -> OutputDelta:
    return OutputDelta(
        **{"index": index, "text": text, "token_ids": list(token_ids), "logprobs": None, "finish_reason": None}
        | {"stop_reason": None, "metrics": None, "error": None}
        | options
    )


def last(index: int = 0, finish_reason: str = "stop", *, text: str = "z", metrics=STARTED, **options) -> OutputDelta:
    return delta(index, text, finish_reason=finish_reason, metrics=metrics, **options)


class Stream:
    """Gives the deltas of a script, and ends when it is closed."""

    def __init__(self, request_id: str, script: list[OutputDelta]) -> None:
        self.request_id = request_id
        self.num_closes = 0
        self.is_complete = False
        self.on_news = lambda: None
        self._script = list(script)

    def take(self) -> OutputDelta | None:
        return self._script.pop(0) if self._script and not self.num_closes else None

    def close(self) -> None:
        self.num_closes += 1
        self.is_complete = True
        self.on_news()


class World:
    """A server whose engine plays a script, a client that may leave, and what was counted."""

    def __init__(self, *scripts: list[OutputDelta], **options) -> None:
        self.scripts = list(scripts)
        self.streams: list[Stream] = []
        self.submitted: list[dict] = []
        self.finished = []
        self.tokens = []
        self.first_tokens = []
        self.client_leaves = asyncio.Event()
        self.server = SimpleNamespace(
            llm=SimpleNamespace(
                submit=self._submit, state="ready", info=SimpleNamespace(max_model_len=100, vocab_size=50)
            ),
            config=ServerConfig(**options),
            drain=Drain(),
            metrics=SimpleNamespace(
                tokens=lambda number, gap_s: self.tokens.append((number, gap_s is None)),
                first_token=lambda ttft_s, num_prompt_tokens: self.first_tokens.append(num_prompt_tokens),
            ),
            finished=self.finished.append,
        )

    async def _submit(self, prompt_token_ids, params, options, *, request_id, streams, on_abandoned) -> Stream:
        asked = {"prompt_token_ids": prompt_token_ids, "params": params, "options": options, "streams": streams}
        self.submitted.append(asked)
        self.streams.append(Stream(request_id, self.scripts.pop(0)))
        return self.streams[-1]

    async def receive(self) -> dict:
        await self.client_leaves.wait()
        return {"type": "http.disconnect"}

    async def start(
        self, prompt=(1, 2), *, n: int = 1, max_tokens: int | None = 10, timeout_s: float = 5.0
    ) -> Generation:
        call = Call(
            request_id="theirs",
            endpoint="/v1/test",
            caller=Caller(tenant="t", key_name="k"),
            options=RequestOptions(priority=4, tenant="t", timeout_s=timeout_s),
            received=0.0,
        )
        params = SamplingParams(n=n, max_tokens=max_tokens)
        http_request = SimpleNamespace(receive=self.receive, scope={})
        return await Generation.start(self.server, http_request, call, list(prompt), params)

    def assert_over(self, *finish_reasons: str) -> None:
        """All is given back, and told once for each stream."""
        assert self.server.drain.num_active == 0
        assert all(stream.num_closes for stream in self.streams)
        assert [tuple(finished.finish_reasons) for finished in self.finished] == [finish_reasons] * len(self.streams)


@contextmanager
def refused(status: int, code: str | None, words: str):
    with pytest.raises(ApiError, match=words) as caught:
        yield
    assert (caught.value.status, caught.value.code) == (status, code)


def test_choices_are_put_together_and_counted():
    async def run() -> None:
        world = World([delta(1, "b"), delta(0, "a", (1, 2)), last(0, "length"), delta(1, ""), last(1, stop_reason="|")])
        generation = await world.start(n=2)
        assert world.server.drain.num_active == 1
        choices = await gather(generation)
        shown = [(choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) for choice in choices]
        assert shown == [("az", [1, 2, 1], "length", None), ("bz", [1, 1, 1], "stop", "|")]
        world.assert_over("length", "stop")
        (finished,) = world.finished
        assert (list(finished.output_lens), finished.num_prompt_tokens, finished.num_cached_tokens) == ([3, 3], 2, 3)
        assert (finished.request_id, finished.tenant, finished.key_name, finished.priority) == ("theirs", "t", "k", 4)
        assert (finished.first_scheduled, finished.first_token, finished.error) == (1.0, 2.0, None)
        assert world.tokens == [(1, True), (2, True), (1, False), (1, False), (1, False)]
        assert world.first_tokens == [2]
        (submitted,) = world.submitted
        assert submitted["options"] == RequestOptions(priority=4, tenant="t", timeout_s=5.0)
        assert submitted["streams"] is False

    asyncio.run(run())


@pytest.mark.parametrize(
    ("end", "status", "code", "words"),
    [
        (last(finish_reason="timeout"), 408, "timeout", "not complete after .* with 2 tokens"),
        (last(finish_reason="timeout", token_ids=(), metrics=NEVER_STARTED), 503, "queue_timeout", "did not start"),
        (last(finish_reason="error", error="boom"), 500, "engine_error", "boom"),
        (last(finish_reason="abort"), 400, "request_aborted", "operator"),
    ],
)
def test_an_end_that_is_no_answer_is_an_error(end, status, code, words):
    async def run() -> None:
        world = World([delta(), end])
        with refused(status, code, words):
            await gather(await world.start())
        world.assert_over(end.finish_reason)
        assert world.finished[0].error is not None

    asyncio.run(run())


def test_what_was_made_is_read_before_the_error_that_ends_it():
    async def run() -> None:
        world = World([delta(text="a"), last(finish_reason="timeout", text="b", token_ids=(1, 2))])
        generation, texts = await world.start(), []
        with refused(408, "timeout", "with 3 tokens made"):
            async for new in deltas(generation):
                texts.append((new.text, new.finish_reason))
        assert texts == [("a", None), ("b", None)]
        world.assert_over("timeout")

    asyncio.run(run())


def test_the_books_are_closed_when_the_engine_has_told_the_last():
    """With all tokens of all choices, whoever reads them; one that the reader had enough of is as long as he read."""

    async def run() -> None:
        world = World([delta(0), delta(1), delta(2, token_ids=(1, 2))])
        generation = await world.start(n=3)
        (stream,) = world.streams
        stream.close = lambda: None  # The engine takes its time.
        assert generation.take().index == 0
        generation.complete(0)
        generation.close()
        assert (world.finished, world.server.drain.num_active) == ([], 0)
        rest = [last(0, "stop"), last(1, "abort", token_ids=[7] * 50), last(2, "error", token_ids=())]
        for number, end in enumerate(rest):
            stream._script.append(end)
            stream.is_complete = number == 2
            stream.on_news()
            await asyncio.sleep(0)
        (finished,) = world.finished
        assert (list(finished.output_lens), finished.finish_reasons) == ([1, 51, 2], ["stop", "abort", "abort"])

    asyncio.run(run())


def test_a_dead_engine_is_the_servers_fault():
    async def run() -> None:
        world = World([last(finish_reason="error", error="the process died")])
        generation = await world.start()
        world.server.llm.state = "restarting"
        with refused(503, "engine_dead", "the process died"):
            await gather(generation)

    asyncio.run(run())


def test_the_end_of_the_server_is_told_as_such():
    async def run() -> None:
        world = World([last(finish_reason="error", error="the connection to the engine has been closed")])
        generation = await world.start()
        world.server.drain.board.phase = Phase.STOPPING
        with refused(503, "shutting_down", "send the request again"):
            await gather(generation)

    asyncio.run(run())


def test_the_error_of_one_choice_ends_all():
    async def run() -> None:
        world = World([delta(0), last(1, "error", error="boom")])
        with refused(500, "engine_error", "boom"):
            await gather(await world.start(n=2))
        world.assert_over("error", "error")

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_request_at_once():
    async def run() -> None:
        world = World([delta(0), delta(1)])
        gathering = asyncio.create_task(gather(await world.start(n=2)))
        await asyncio.sleep(0.01)
        world.client_leaves.set()
        with pytest.raises(ClientLeftError):
            await gathering
        world.assert_over("abort", "abort")
        assert world.finished[0].error is None

    asyncio.run(run())


def test_a_client_that_leaves_ends_a_request_that_nobody_reads():
    async def run() -> None:
        world = World([delta()])
        generation = await world.start()
        world.client_leaves.set()
        await asyncio.sleep(0.01)
        world.assert_over("abort")
        generation.close()
        world.assert_over("abort")

    asyncio.run(run())


def test_a_reader_that_is_cancelled_ends_the_request():
    async def run() -> None:
        world = World([delta()])
        gathering = asyncio.create_task(gather(await world.start()))
        await asyncio.sleep(0.01)
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
        world.assert_over("abort")

    asyncio.run(run())


def test_a_reader_may_have_enough_of_a_choice():
    async def run() -> None:
        world = World([delta(0, "a"), delta(1, "b"), delta(0, "no more"), delta(1, "c"), delta(1, "no more")])
        generation = await world.start(n=2)
        texts = []
        async for new in deltas(generation):
            texts.append(new.text)
            if new.text in ("a", "c"):
                generation.complete(new.index)
        assert texts == ["a", "b", "c"]
        world.assert_over("stop", "stop")

    asyncio.run(run())


def test_the_answers_of_several_prompts_come_as_they_are_made():
    async def run() -> None:
        world = World([delta(text="a"), last(text="b")], [last(text="c")], [delta(text="d"), last(text="e")])
        generations = [await world.start() for _ in range(3)]
        texts = ["", "", ""]
        async for new in deltas(GenerationGroup(generations)):
            texts[new.index] += new.text
        assert texts == ["ab", "c", "de"]
        world.assert_over("stop")

    asyncio.run(run())


def test_the_error_of_one_prompt_ends_the_others():
    async def run() -> None:
        world = World([delta()], [last(finish_reason="error", error="boom")], [delta()])
        generations = [await world.start() for _ in range(3)]
        with refused(500, "engine_error", "boom"):
            async for _ in deltas(GenerationGroup(generations)):
                pass
        assert world.server.drain.num_active == 0
        assert [finished.finish_reasons[0] for finished in world.finished].count("abort") == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "words"),
    [
        ([], 1, None, "is empty"),
        ([1] * 91, 10, "context_length_exceeded", "has 91 tokens and max_tokens is 10; the context holds 100"),
        ([1] * 100, None, "context_length_exceeded", "has 100 tokens and at least 1 must be made"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_the_arithmetic(prompt, max_tokens, code, words):
    async def run() -> None:
        world = World([])
        with refused(400, code, words):
            await world.start(prompt, max_tokens=max_tokens)
        assert world.submitted == world.finished == []
        assert world.server.drain.num_active == 0

    asyncio.run(run())


def test_the_operators_limit_of_prompts():
    async def run() -> None:
        world = World([last()], max_prompt_tokens=3)
        await gather(await world.start([1] * 3))
        with refused(400, "context_length_exceeded", "has 4 tokens; this server takes 3 at most"):
            await world.start([1] * 4)

    asyncio.run(run())


def test_a_request_that_the_engine_does_not_end_in_its_time_ends_here(monkeypatch):
    monkeypatch.setattr("jaxllm.server.api.generation.generation._GRACE_S", 0.01)

    async def run() -> None:
        world = World([delta()])
        generation = await world.start(timeout_s=0.05)
        with refused(408, "timeout", "not complete after 0.05 s, with 1 tokens made"):
            async for _ in deltas(generation):
                pass
        world.assert_over("timeout")

    asyncio.run(run())


def test_what_has_come_in_time_may_be_read_later(monkeypatch):
    monkeypatch.setattr("jaxllm.server.api.generation.generation._GRACE_S", 0.0)

    async def run() -> None:
        world = World([delta(), last()])
        generation = await world.start(timeout_s=0.05)
        world.streams[0].is_complete = True
        async for _ in deltas(generation):
            await asyncio.sleep(0.1)
        world.assert_over("stop")

    asyncio.run(run())


def test_an_engine_that_takes_nothing_in_is_not_waited_for():
    async def run() -> None:
        world = World()
        world.server.llm.submit = lambda *args, **options: asyncio.Event().wait()
        with refused(503, "queue_timeout", "did not start in time"):
            await world.start(timeout_s=0.05)
        assert world.server.drain.num_active == 0

    asyncio.run(run())


def test_a_client_that_leaves_before_the_engine_takes_its_request_in_waits_for_nothing():
    async def run() -> None:
        world = World()
        world.server.llm.submit = lambda *args, **options: asyncio.Event().wait()
        starting = asyncio.create_task(world.start(timeout_s=1000.0))
        await asyncio.sleep(0.01)
        world.client_leaves.set()
        with pytest.raises(ClientLeftError):
            await asyncio.wait_for(starting, 5.0)
        assert world.server.drain.num_active == 0

    asyncio.run(run())


@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_client_that_leaves_while_the_engine_takes_its_request_in_ends_it(leaves_first, num_turns):
    """Whichever is known first, by so many turns of the event loop."""

    async def run() -> None:
        world = World([delta()])
        submit, taken = world.server.llm.submit, asyncio.Event()

        async def submit_slowly(*args, **options):
            await taken.wait()
            return await submit(*args, **options)

        world.server.llm.submit = submit_slowly
        starting = asyncio.create_task(world.start(timeout_s=1000.0))
        await asyncio.sleep(0.01)
        first, second = (world.client_leaves, taken) if leaves_first else (taken, world.client_leaves)
        first.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        second.set()
        with pytest.raises(ClientLeftError):
            async with asyncio.timeout(5.0):
                await gather(await starting)
        assert world.server.drain.num_active == 0
        assert all(stream.num_closes for stream in world.streams)

    asyncio.run(run())


def test_a_draining_server_takes_nothing():
    async def run() -> None:
        world = World([])
        world.server.drain.start()
        with refused(503, "draining", "draining"):
            await world.start()
        assert world.submitted == []

    asyncio.run(run())
