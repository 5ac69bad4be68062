"""What the official clients send again, with their own number of retries: only what may come out otherwise."""

import asyncio
from typing import Any

import anthropic
import openai
import pytest

from jaxllm.server.api.errors import ApiError

SLOW: list[Any] = [{"role": "user", "content": "!slow"}]


def num_generations(server: Any) -> int:
    """So far, that have ended."""
    server.wait_until_idle()
    counts = server.llm.stats.scheduler.num_requests
    return sum(count for status, count in counts.items() if status.is_finished)


def test_a_request_that_ran_out_of_its_time_is_made_once(stub_server):
    before = num_generations(stub_server)
    body: dict[str, Any] = {"model": "stub", "max_tokens": 100, "extra_headers": {"X-Timeout-S": "0.3"}}
    with openai.OpenAI(base_url=stub_server.url + "/v1", api_key="-") as client:
        for ask in (
            lambda: client.chat.completions.create(messages=SLOW, **body),
            lambda: client.completions.create(prompt="!slow", **body),
        ):
            with pytest.raises(openai.APIStatusError, match=r"not complete after 0\.3 s") as late:
                ask()
            assert late.value.status_code == 408
    with anthropic.Anthropic(base_url=stub_server.url, api_key="-") as client:
        with pytest.raises(anthropic.APIStatusError, match=r"not complete after 0\.3 s") as late_message:
            client.messages.create(messages=SLOW, **body)
        assert late_message.value.type == "timeout_error"
    assert num_generations(stub_server) == before + 3


def test_a_request_for_which_there_was_no_room_is_sent_again(start_stub):
    server = start_stub({"max_num_seqs": 1, "max_queued_requests": 1})
    body: dict[str, Any] = {"model": "stub", "messages": SLOW, "max_tokens": 6}

    async def ask_four(max_retries: int) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=max_retries) as client:
            asked = [client.chat.completions.create(**body) for _ in range(4)]
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(ask_four(0))
    (refused, *_) = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refused.response.headers["x-should-retry"] == "true"
    assert [answer.choices[0].finish_reason for answer in asyncio.run(ask_four(3))] == ["length"] * 4


def test_an_error_says_whether_to_send_the_request_again():
    assert ApiError(503, "full", retry_after_s=2.0).headers == {"retry-after": "2", "x-should-retry": "true"}
    assert ApiError(408, "late", should_retry=False).headers == {"x-should-retry": "false"}
    assert ApiError(500, "a defect").headers == {}  # Whether it would come again, nobody knows.
