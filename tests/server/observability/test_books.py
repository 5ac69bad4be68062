"""The books: what metrics, log and usage say was made is what the engine has made, however requests end."""

import asyncio
import random
from contextlib import contextmanager

import httpx
import pytest
from metric_samples import samples

from jaxllm.engine.process.messages import Taken

MAX_TOKENS = 100
ENDLESS = {"model": "tiny", "ignore_eos": True, "temperature": 1.0}


class Books:
    """What a server and its engine have counted since this was made. The engine's own count comes with a heartbeat."""

    def __init__(self, server):
        self.server = server
        self.finished = {}  # what metrics and log are told of each request, by the name the client gave it
        self._before = self._now()

    @contextmanager
    def open(self):
        application = self.server.app.state.server
        tell = application.finished

        def finished(request):
            assert request.request_id not in self.finished
            self.finished[request.request_id] = request
            tell(request)

        application.finished = finished
        try:
            yield self
        finally:
            del application.finished

    def close(self):
        """(tokens that the engine has made, tokens that the metrics have counted)"""
        self.server.wait_for(lambda: self.server.app.state.server.drain.num_active == 0)
        now = self._now()  # Of an engine that is idle, and so has told all ends.
        return tuple(now - before for now, before in zip(now, self._before, strict=True))

    def _now(self):
        self.server.wait_until_idle()
        found = samples(httpx.get(f"{self.server.url}/metrics").content)
        return self.server.llm.stats.num_output_tokens, found["jaxllm:generation_tokens_total",]

    def num_output_tokens(self):
        return sum(request.num_output_tokens for request in self.finished.values())


@pytest.fixture
def books(tiny_server):
    with Books(tiny_server).open() as books:
        yield books


async def post(client, name, path, body, *, leave_after_s=None, timeout_s=None):
    """The answer, read to its end or until the client leaves."""
    headers = {"X-Request-Id": name} | ({} if timeout_s is None else {"X-Timeout-S": str(timeout_s)})
    try:
        async with asyncio.timeout(leave_after_s):
            return await client.post(path, json=ENDLESS | body, headers=headers)
    except TimeoutError:
        return None


async def cancel_in_background(client, name, after_s):
    """A response that is cancelled; as it is then."""
    body = {"input": "abc", "max_output_tokens": MAX_TOKENS, "background": True}
    response = (await post(client, name, "/v1/responses", body)).json()
    await asyncio.sleep(after_s)
    return (await client.post(f"/v1/responses/{response['id']}/cancel")).json()


def test_the_books_are_the_engines_after_random_aborts(books):
    """Streamed or not, one choice or several, read to the end, left, out of time, or cancelled."""
    choose = random.Random(5)
    usages = {}

    async def run_one(client, number):
        name, ends_in_s = f"r{number}", choose.choice((0.0, 0.01, 0.1, 0.2, 0.4))
        body = {"prompt": "abc" * choose.randint(1, 3), "max_tokens": choose.randint(1, MAX_TOKENS), "stream": False}
        match choose.choice(("whole", "stream", "leave", "leave stream", "time out", "cancel")):
            case "whole":
                answer = await post(client, name, "/v1/completions", body | {"n": choose.randint(1, 2)})
                usages[name] = answer.json()["usage"]["completion_tokens"]
            case "stream":
                await post(client, name, "/v1/completions", body | {"stream": True, "n": 2})
            case "leave":
                await post(client, name, "/v1/completions", body | {"n": 2}, leave_after_s=ends_in_s)
            case "leave stream":
                await post(client, name, "/v1/completions", body | {"stream": True}, leave_after_s=ends_in_s)
            case "time out":
                await post(client, name, "/v1/completions", body, timeout_s=ends_in_s or 0.001)
            case "cancel":
                response = await cancel_in_background(client, name, ends_in_s)
                usages[name] = response["usage"]["output_tokens"]

    async def run():
        limits = httpx.Limits(max_connections=12)  # fewer than there are rows, more than can be made at once
        async with httpx.AsyncClient(base_url=books.server.url, timeout=60.0, limits=limits) as client:
            await asyncio.gather(*(run_one(client, number) for number in range(60)))

    asyncio.run(run())
    num_made, num_counted = books.close()
    assert num_made == num_counted == books.num_output_tokens()
    assert usages == {name: books.finished[name].num_output_tokens for name in usages}
    reasons = {reason for request in books.finished.values() for reason in request.finish_reasons}
    assert reasons == {"length", "abort", "timeout"}


DELAYS_S = [0.02 * 1.5**number for number in range(15)]  # after one of which a request is in the middle of its answer


def test_a_request_that_nobody_waits_for_is_in_the_books_with_all_its_tokens(books):
    async def run(name, after_s):
        async with httpx.AsyncClient(base_url=books.server.url, timeout=60.0) as client:
            body = {"prompt": "abc", "max_tokens": MAX_TOKENS}
            await post(client, name, "/v1/completions", body, leave_after_s=after_s)

    for after_s in DELAYS_S:
        name = f"left-{after_s:.3f}"
        asyncio.run(run(name, after_s))
        num_made, num_counted = books.close()
        assert num_made == num_counted == books.num_output_tokens()
        left = books.finished.get(name)  # None where the request had not come so far
        if left is not None and left.finish_reasons == ["abort"] and left.num_output_tokens > 1:
            return
    pytest.fail("no request was in the middle of its answer when its client left")


def test_what_was_made_before_the_engine_heard_that_nobody_waits_is_in_the_books(books, monkeypatch):
    """As when the engine's word that it has taken a request in and the end of the request's time pass each other."""
    client = books.server.llm._client
    hear = client._hear
    monkeypatch.setattr(client, "_hear", lambda message: None if isinstance(message, Taken) else hear(message))

    async def run():
        async with httpx.AsyncClient(base_url=books.server.url, timeout=60.0) as client:
            body = {"prompt": "abc", "max_tokens": MAX_TOKENS, "n": 2}
            return await post(client, "late", "/v1/completions", body, timeout_s=0.1)

    assert asyncio.run(run()).status_code == 503
    num_made, num_counted = books.close()
    assert num_made == num_counted == books.num_output_tokens() > 0


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_response_that_was_cut_off_keeps_what_was_made_and_says_how_much(books, end):
    async def run(name, after_s):
        async with httpx.AsyncClient(base_url=books.server.url, timeout=60.0) as client:
            if end == "cancelled":
                return await cancel_in_background(client, name, after_s)
            body = {"input": "abc", "max_output_tokens": MAX_TOKENS, "background": True}
            response = (await post(client, name, "/v1/responses", body, timeout_s=after_s)).json()
            while response.get("status") == "in_progress":
                await asyncio.sleep(0.01)
                response = (await client.get(f"/v1/responses/{response['id']}")).json()
            return response

    num_told = 0
    for after_s in DELAYS_S:
        response = asyncio.run(run(f"{end}-{after_s:.3f}", after_s))
        if "usage" not in response:  # It ran out of time in the queue.
            continue
        num_told += response["usage"]["output_tokens"]
        assert books.close() == (num_told, num_told)
        if response["status"] == end and response["usage"]["output_tokens"] > 1:
            assert response["output"][0]["content"][0]["text"]
            assert response["output"][0]["status"] == "incomplete"
            return
    pytest.fail(f"no response was {end} in the middle of its answer")


def test_tokens_past_a_stop_string_are_counted_and_are_not_the_answers(books):
    """The stop is found on the client's side, when the engine has gone on."""

    async def run():
        async with httpx.AsyncClient(base_url=books.server.url, timeout=60.0) as client:
            body = {"prompt": "abc", "max_tokens": MAX_TOKENS, "stop": list("abcdefghijklmnopqrstuvwxyz"), "n": 2}
            return (await post(client, "stopped", "/v1/completions", body)).json()

    answer = asyncio.run(run())
    num_made, num_counted = books.close()
    assert answer["usage"]["completion_tokens"] == books.finished["stopped"].num_output_tokens <= num_made
    assert num_counted == num_made
