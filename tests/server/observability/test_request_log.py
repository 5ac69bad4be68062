"""The request log: one line for each request, and never a key."""

import json
import logging

import httpx
import pytest

from jaxllm import SamplingParams
from jaxllm.server.observability.finished_request import FinishedRequest
from jaxllm.server.observability.logs import TextFormatter
from jaxllm.server.observability.request_log import RequestLog
from jaxllm.server.server_config import ServerConfig

LOGGER = "jaxllm.server.requests"
SECRET = "sk-very-secret-0123456789"


def line_of(caplog, log_format: str, **facts) -> str:
    """The one line that this request makes."""
    request = FinishedRequest(
        **{
            "request_id": "r-1",
            "endpoint": "/v1/chat/completions",
            "params": SamplingParams(max_tokens=8, temperature=0.5),
            "num_prompt_tokens": 1200,
            "output_lens": [5],
            "finish_reasons": ["stop"],
            "received": 100.0,
            "first_scheduled": 100.25,
            "first_token": 101.0,
            "finished": 103.0,
            "key_name": "alice",
            "tenant": "research",
        }
        | facts
    )
    with caplog.at_level(logging.INFO, LOGGER):
        RequestLog(ServerConfig(log_format=log_format)).finished(request)
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    message = record.getMessage() if log_format == "json" else TextFormatter().format(record)
    assert "\n" not in message
    return message


def test_a_line_for_people_has_what_they_look_for(caplog):
    line = line_of(caplog, "text", num_cached_tokens=1024)
    assert line == (
        "/v1/chat/completions stop r-1 · prompt 1,200 (1,024 cached) · output 5 · queue 250.0 ms · TTFT 1,000.0 ms · "
        "TPOT 500.0 ms · total 3.000 s · key alice · tenant research"
    )


def test_a_request_that_never_started_has_no_times(caplog):
    line = line_of(
        caplog, "text", first_scheduled=None, first_token=None, finish_reasons=["abort"], output_lens=[0], key_name=""
    )
    assert line == "/v1/chat/completions abort r-1 · prompt 1,200 · output 0 · total 3.000 s · tenant research"


def test_several_choices_share_a_line(caplog):
    line = line_of(caplog, "text", finish_reasons=["stop", "length", "stop"], output_lens=[1, 2, 3])
    assert "stop,length r-1" in line
    assert "output 6 in 3 choices" in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_error_of_several_lines_stays_on_one(caplog, log_format):
    line = line_of(caplog, log_format, finish_reasons=["error"], error='it\nfailed: "why"')
    assert "failed" in line


def test_a_line_of_json_has_the_same_in_fields(caplog):
    fields = json.loads(line_of(caplog, "json", is_streamed=True, priority=3))
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "event": "request",
        "request_id": "r-1",
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "key_name": "alice",
        "tenant": "research",
        "priority": 3,
        "finish_reasons": ["stop"],
        "prompt_tokens": 1200,
        "cached_tokens": 0,
        "output_tokens": 5,
        "max_tokens": 8,
        "n": 1,
        "temperature": 0.5,
        "queue_ms": 250.0,
        "ttft_ms": 1000.0,
        "tpot_ms": 500.0,
        "e2e_ms": 3000.0,
        "error": None,
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_refusal_has_its_line_too(caplog, log_format):
    with caplog.at_level(logging.INFO, LOGGER):
        RequestLog(ServerConfig(log_format=log_format)).refused(
            endpoint="/v1/completions", request_id="r-2", status=429, message="the queue\nis full"
        )
    line = caplog.records[-1].getMessage()
    if log_format == "text":
        line = TextFormatter().format(caplog.records[-1])
        assert line == r"/v1/completions 429 r-2 · the queue\nis full"
    else:
        fields = json.loads(line)
        assert (fields["event"], fields["status"], fields["error"]) == ("refusal", 429, "the queue\nis full")


def test_a_path_cannot_write_lines_of_its_own_nor_move_the_cursor(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        RequestLog(ServerConfig()).refused(
            endpoint="/a\r\nINFO all is well\x1b[2J\x85\u2028", request_id="r-2", status=404, message="no \x07 here"
        )
    line = TextFormatter().format(caplog.records[-1])
    assert line == r"/a\r\nINFO all is well\x1b[2J\x85\u2028 404 r-2 · no \x07 here"


def test_what_was_said_is_not_in_the_line_of_a_refusal(start_stub, caplog):
    server = start_stub(log_level="info")
    caplog.set_level(logging.INFO, LOGGER)
    logging.getLogger("jaxllm").propagate = True
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "stub", "prompt": {"my": "secret"}})
    assert "secret" in answer.json()["error"]["message"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert "prompt: it must be a text" in line
    assert "secret" not in line


def test_a_live_server_logs_each_request_once_and_no_key(start_stub, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    for name in ("jaxllm", "uvicorn"):  # They would not reach caplog's handler.
        logging.getLogger(name).propagate = True
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": SECRET, "name": "alice", "tenant": "research"}]}))
    server = start_stub(api_keys_file=str(keys), log_format="json", log_level="debug")
    caplog.set_level(logging.DEBUG, LOGGER)
    logging.getLogger("jaxllm").propagate = True
    body = {"model": "stub", "prompt": "abc", "max_tokens": 4}
    good = {"Authorization": f"Bearer {SECRET}", "X-Request-Id": "mine-1"}
    wrong_key = SECRET + "-wrong"
    with httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json=body, headers=good).raise_for_status()
        client.post("/v1/completions", json=body, headers={"x-api-key": SECRET}).raise_for_status()
        for headers in ({"Authorization": f"Bearer {wrong_key}"}, {"x-api-key": wrong_key}, {}):
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 401
        client.post("/v1/completions", json={**body, "prompt": 7}, headers=good)
    server.wait_until_idle()
    server.wait_for(lambda: sum(record.name == LOGGER for record in caplog.records) >= 6)
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == LOGGER]
    assert [line["event"] for line in lines] == ["request"] * 2 + ["refusal"] * 4
    assert [line["key_name"] for line in lines[:2]] == ["alice", "alice"]
    assert lines[0]["request_id"] == "mine-1"
    assert [line["status"] for line in lines[2:]] == [401, 401, 401, 400]
    assert all(SECRET not in f"{record.getMessage()} {record.args}" for record in caplog.records)


def test_a_request_that_fails_in_the_middle_has_one_line(start_stub, caplog):
    server = start_stub(log_format="json", log_level="info")
    caplog.set_level(logging.INFO, LOGGER)
    logging.getLogger("jaxllm").propagate = True
    body = {"model": "stub", "prompt": "!raise", "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 500
    server.wait_until_idle()
    (line,) = [json.loads(record.getMessage()) for record in caplog.records if record.name == LOGGER]
    assert (line["event"], line["finish_reasons"]) == ("request", ["error"])
    assert line["error"]
