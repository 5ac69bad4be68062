"""What the headers of a request may ask for, beside what the key and the server allow."""

import asyncio
from dataclasses import fields
from types import SimpleNamespace

import pytest
from fastapi import Request

from jaxllm import RequestOptions
from jaxllm.server.api.call import Call, read_call
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.keys import Caller
from jaxllm.server.api.protocol.option_fields import OptionFields
from jaxllm.server.server_config import ServerConfig


def call(*, priority_of_key: int = 0, config: ServerConfig | None = None, **headers: str) -> Call:
    keys = SimpleNamespace(caller=lambda key: Caller(tenant="t", priority=priority_of_key))
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(keys=keys, config=config or ServerConfig())))
    raw_headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/v1/test", "headers": raw_headers, "request_id": "r", "app": app}
    scope |= {"server": ("test", 80), "query_string": b"", "root_path": ""}
    return asyncio.run(read_call(Request(scope)))


@pytest.mark.parametrize("name", ["timeout_s", "queue_timeout_s"])
def test_a_client_may_ask_for_less_time_and_not_for_more(name):
    config = ServerConfig(request_timeout_s=60.0, queue_timeout_s=60.0)
    assert getattr(call(config=config).options, name) == 60.0
    assert getattr(call(config=config, **{f"x_{name}": "1.5"}).options, name) == 1.5
    assert getattr(call(config=config, **{f"x_{name}": "61"}).options, name) == 60.0
    without_limit = ServerConfig(request_timeout_s=None, queue_timeout_s=None)
    assert getattr(call(config=without_limit).options, name) is None
    assert getattr(call(config=without_limit, **{f"x_{name}": "61"}).options, name) == 61.0


def test_key_headers_and_body_together_say_every_option():
    said = call(priority_of_key=1, x_priority="2", x_timeout_s="30", x_queue_timeout_s="3").with_body(
        OptionFields(cache_salt="s")
    )
    assert said.options == RequestOptions(priority=3, tenant="t", cache_salt="s", timeout_s=30.0, queue_timeout_s=3.0)
    assert all(getattr(said.options, option.name) != option.default for option in fields(RequestOptions))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_a_time_that_cannot_be_is_told_by_its_header(value):
    with pytest.raises(ApiError, match="X-Timeout-S is") as caught:
        call(x_timeout_s=value)
    assert (caught.value.status, caught.value.param) == (400, "X-Timeout-S")


def test_a_priority_is_added_to_that_of_the_key():
    assert call(priority_of_key=10).options.priority == 10
    assert call(priority_of_key=10, x_priority="3").options.priority == 13
    assert call(priority_of_key=10, x_priority="3").with_body(OptionFields(priority=5)).options.priority == 15
    assert call(priority_of_key=-10, x_priority="3").options.priority == -7


@pytest.mark.parametrize("value", [-1, 2**31 - 10])
def test_nobody_gets_before_his_key_nor_beyond_32_bits(value):
    with pytest.raises(ApiError, match=f"X-Priority is {value:,}; it is added to the priority 10 of the API key"):
        call(priority_of_key=10, x_priority=str(value))
    with pytest.raises(ApiError, match=f"priority is {value:,}"):
        call(priority_of_key=10).with_body(OptionFields(priority=value))


def test_the_longest_wait_is_the_shorter_limit():
    def wait_s(request_timeout_s: float | None, queue_timeout_s: float | None) -> float | None:
        config = ServerConfig(request_timeout_s=request_timeout_s, queue_timeout_s=queue_timeout_s)
        return call(config=config).longest_wait_s

    assert [wait_s(*limits) for limits in ((5, 3), (3, 5), (None, 3), (3, None))] == [3] * 4
    assert wait_s(None, None) is None
