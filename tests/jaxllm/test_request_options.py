"""An option travels whole: another one needs its declaration, whoever says it, and whoever heeds it."""

from dataclasses import asdict, fields

import pytest
from said_options import SAID

from jaxllm import InvalidRequestError, RequestOptions, SamplingParams
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.process.messages import Submit, decode_to_core, encode

PARAMS = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture
def heard(tiny_llm, monkeypatch):
    """What the scheduler hears of the options of each request."""
    scheduler, heard = tiny_llm.engine.scheduler, []
    add = scheduler.add_request

    def add_request(request):
        heard.append(request.options)
        add(request)

    monkeypatch.setattr(scheduler, "add_request", add_request)
    return heard


def test_the_sample_has_every_option():
    assert all(getattr(SAID, option.name) != option.default for option in fields(RequestOptions))


def test_every_option_reaches_the_scheduler(tiny_llm, heard):
    tiny_llm.generate(["a", "b"], PARAMS, use_tqdm=False, **asdict(SAID))
    assert heard == [SAID] * 2
    list(tiny_llm.stream("a", PARAMS, **asdict(SAID)))
    tiny_llm.engine.add_request("name", [5], SamplingParams(max_tokens=2, n=2), SAID)
    while tiny_llm.engine.has_unfinished_requests:
        tiny_llm.engine.step()
    assert heard == [SAID] * 5
    tiny_llm.generate("a", PARAMS, use_tqdm=False)
    assert heard[5:] == [RequestOptions()]


def test_every_option_reaches_another_process():
    submit = Submit([1], [None], CoreRequest(request_id="a", prompt_token_ids=[1], options=SAID))
    assert decode_to_core(encode(submit)) == submit


@pytest.mark.parametrize(
    ("option", "words", "param"),
    [
        (
            {"priority": 2**31},
            r"^priority is 2,147,483,648; it must be from -2,147,483,647 to 2,147,483,647",
            "priority",
        ),
        ({"timeout_s": float("nan")}, "^timeout_s is nan; it must be a number of seconds, 0 or more", "timeout_s"),
        ({"prio": 1}, "RequestOptions has no option 'prio'. Did you mean priority?", None),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(tiny_llm, option, words, param):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        tiny_llm.generate("a", PARAMS, use_tqdm=False, **option)
    assert caught.value.param == param
