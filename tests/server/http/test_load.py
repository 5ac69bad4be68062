"""Many clients at once, of whom a third leaves at a random moment: the others notice nothing, and nothing is left."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from serve_process import ServeProcess

from jaxllm.server.commands.serve import ENGINE

ANSWER_TIMEOUT_S = 600.0
_IDLE_METRICS = r"^jaxllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)$"


@dataclass(frozen=True)
class Question:
    """A request whose answer is always the same: greedy, in float32."""

    prompt: str
    max_tokens: int
    is_chat: bool

    async def ask(self, client: httpx.AsyncClient, model: str, *, stream: bool) -> str:
        body = {"model": model, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        if self.is_chat:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": self.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", self.prompt
        if not stream:
            response = await client.post(path, json=body)
            response.raise_for_status()
            return self._text(response.json()["choices"][0], "message")
        text, last = "", ""
        async with client.stream("POST", path, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = httpx.Response(200, text=line[6:]).json()["choices"]
                    text += self._text(choice, "delta")
                    last = choice["finish_reason"] or last
                elif line and not line.startswith(":"):  # a comment, as the first token may be long in coming
                    assert line == "data: [DONE]"
        assert last == "length"
        return text

    def _text(self, choice: dict, name: str) -> str:
        return choice[name].get("content", "") if self.is_chat else choice["text"]


def make_questions(number: int, max_tokens: Sequence[int], seed: int) -> list[Question]:
    rng = random.Random(seed)
    words = [
        "stone",
        "river",
        "lamp",
        "winter",
        "seven",
        "cloud",
        "paper",
        "garden",
        "night",
        "engine",
        "silver",
        "bread",
    ]
    return [
        Question(" ".join(rng.choices(words, k=rng.randint(2, 7))), rng.choice(max_tokens), is_chat=bool(i % 2))
        for i in range(number)
    ]


async def answers_alone(url: str, model: str, questions: Sequence[Question]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S) as client:
        return [await question.ask(client, model, stream=False) for question in questions]


async def run_round(
    url: str,
    model: str,
    questions: Sequence[Question],
    answers: Sequence[str],
    *,
    num_clients: int,
    seed: int,
    leave_within_s: float,
) -> float:
    """Every third client leaves, if it is not answered by then. Returns how long the round took, in seconds."""
    rng, start = random.Random(seed), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S, limits=limits) as client:
        staying, leaving = [], []
        for number in range(num_clients):
            index = rng.randrange(len(questions))
            asking = asyncio.create_task(questions[index].ask(client, model, stream=rng.random() < 0.5))
            if number % 3:
                staying.append((asking, answers[index]))
            else:
                leaving.append(asyncio.create_task(_leave(asking, rng.uniform(0.0, leave_within_s))))
        for asking, answer in staying:
            assert await asking == answer
        await asyncio.gather(*leaving)
    return time.monotonic() - start


async def _leave(asking: asyncio.Task, after_s: float) -> None:
    await asyncio.wait([asking], timeout=after_s)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


def assert_flat(name: str, memory: Sequence[int]) -> None:
    first = memory[0]
    assert max(abs(value - first) for value in memory) <= 0.02 * first, f"{name}: {memory}"


def test_others_notice_nothing_of_clients_that_leave(tiny_server):
    questions = make_questions(12, (5, 20, 40), seed=0)
    answers = asyncio.run(answers_alone(tiny_server.url, "tiny", questions))
    memory, last_s = [], 1.0
    for seed in range(4):
        options = {"num_clients": 60, "seed": seed, "leave_within_s": last_s}
        last_s = asyncio.run(run_round(tiny_server.url, "tiny", questions, answers, **options))
        tiny_server.wait_until_idle()
        assert tiny_server.app.state.server.drain.num_active == 0
        memory.append(psutil.Process(tiny_server.process.pid).memory_info().rss)
    assert_flat("engine", memory[1:])


@pytest.mark.nightly
def test_five_hundred_clients_on_the_demo_model(tmp_path):
    """Both processes are on their own, so that their memory is theirs. The first round is a warm-up."""
    model, engine_options = Path("smollm2-135m"), {"dtype": "float32"}
    server = ServeProcess(tmp_path, model, engine=ENGINE, wait=False, engine_options=engine_options)
    try:
        server.wait_for(lambda: server.url, 600.0)
        own, engine = server.find_processes()
        questions = make_questions(20, (4, 8, 12), seed=1)
        answers = asyncio.run(answers_alone(server.url, "stub", questions))
        memory: dict[str, list[int]] = {"server": [], "engine": []}
        last_s = 30.0
        for seed in range(11):
            options = {"num_clients": 500, "seed": seed, "leave_within_s": last_s}
            last_s = asyncio.run(run_round(server.url, "stub", questions, answers, **options))
            server.wait_for(lambda: _is_idle(server.url), 10.0)
            memory["server"].append(own.memory_info().rss)
            memory["engine"].append(engine.memory_info().rss)
            print({name: values[-1] >> 20 for name, values in memory.items()}, f"MiB, {last_s:.1f} s", flush=True)
        for name, values in memory.items():
            assert_flat(name, values[1:])
    finally:
        server.close()


def _is_idle(url: str) -> bool:
    """No request runs or waits, and all pages are free."""
    values = [float(value) for value in re.findall(_IDLE_METRICS, httpx.get(f"{url}/metrics").text, re.MULTILINE)]
    assert len(values) == 3
    return not any(values)
