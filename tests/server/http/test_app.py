"""The application: the endpoints around generation, and the shape of every error."""

import gc
import itertools
import logging
import shutil
import ssl
import subprocess
import time

import httpx
import openai
import pytest
from raw_http import connect, post, read_all
from streaming_client import Streaming

import jaxllm


@pytest.fixture
def client(stub_server):
    with httpx.Client(base_url=stub_server.url, timeout=30) as client:
        yield client


def error_of(answer: httpx.Response) -> dict:
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def test_models_are_listed_under_their_served_names(start_stub):
    server = start_stub(served_model_name=["stub", "org/stub"])
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-") as client:
        assert [model.id for model in client.models.list()] == ["stub", "org/stub"]
        assert client.models.retrieve("org/stub").id == "org/stub"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; this server has 'stub', 'org/stub'"):
            client.models.retrieve("gpt")


def test_the_model_is_called_as_it_was_given_by_default(start_stub, stub_folder):
    server = start_stub(served_model_name=None)
    (model,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert model["id"] == str(stub_folder)
    assert model["max_model_len"] == 2048


def test_health_version_and_load(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    version = client.get("/version").json()
    assert version["version"] == jaxllm.__version__
    assert version["device"] == "stub"
    assert client.get("/load").json() == {"server_load": 0, "num_running": 0, "num_waiting": 0}


def test_load_counts_what_is_in_progress(client, stub_server):
    streaming = Streaming(stub_server.url, 20)
    streaming.wait_until_begun()
    stub_server.wait_for(lambda: client.get("/load").json()["num_running"] == 1)
    assert client.get("/load").json()["server_load"] == 1
    streaming.assert_complete()
    stub_server.wait_until_idle()
    assert client.get("/load").json()["server_load"] == 0


def test_ready_tells_how_the_engine_is(client):
    answer = client.get("/ready")
    assert answer.status_code == 200
    body = answer.json()
    assert body.pop("heartbeat_age_s") < 5
    assert body == {"ready": True, "reason": None, "engine": "ready", "draining": False}


def test_text_goes_to_tokens_and_back(client):
    text = "Hello, wörld 🌍!"
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == len(text.encode())
    assert len(set(answer["token_strs"])) == len(set(answer["tokens"]))
    assert answer["max_model_len"] == 2048
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_messages_are_tokenized_as_the_template_renders_them(client):
    messages = [{"role": "user", "content": "hi"}]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[user]hi[assistant]"
    tokens = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[user]hi"


def test_special_tokens_are_what_they_are(client):
    tokens = client.post("/tokenize", json={"prompt": "a</s>"}).json()["tokens"]
    assert tokens[-1] == 2
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "a</s>"


def test_a_long_text_is_tokenized_and_one_that_no_context_could_hold_is_not(client):
    text = "word " * 2000
    assert client.post("/tokenize", json={"prompt": text}).json()["count"] == len(text)
    answer = client.post("/tokenize", json={"prompt": text * 10})
    assert answer.status_code == 400
    assert "prompt has 100,000 characters" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "give prompt or messages, and not both"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", "give prompt or messages, and not both"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "tools needs messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "needs messages"),
        ("/tokenize", {"prompt": 3}, "prompt", "prompt is 3: Input should be a valid string"),
        ("/tokenize", {"promt": "a"}, "promt", "promt is not supported"),
        ("/detokenize", {"tokens": [1, 256]}, "tokens[1]", "tokens[1] is 256; the vocabulary has 256 tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "tokens[1] is -1"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]", "tokens[1] is 'x'"),
        ("/detokenize", {}, "tokens", "tokens is missing"),
    ],
)
def test_a_mistake_is_told_by_field_value_and_limit(client, path, body, param, message):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert error["param"] == param


SAID, TEXT = {"role": "user", "content": "a"}, {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"messages": [SAID] * 10_001}, "at most 10000 items"),
        ("/v1/chat/completions", {"messages": [SAID] * 10_001}, "at most 10000 items"),
        ("/v1/chat/completions", {"messages": [{}] * 10_000}, "messages[0].role is missing"),
        ("/v1/messages", {"max_tokens": 1, "messages": [SAID] * 10_001}, "at most 10000"),
        ("/v1/messages", {"max_tokens": 1, "messages": [SAID | {"content": [TEXT] * 10_001}]}, "at most 10000"),
        ("/v1/chat/completions", {"messages": [SAID | {"content": [TEXT] * 10_001}]}, "it has 10001 parts"),
        ("/v1/responses", {"input": [SAID] * 10_001}, "at most 10000 items"),
        ("/v1/completions", {"prompt": "a"} | {f"f{number}": 1 for number in range(200)}, "fields"),
        ("/detokenize", {"tokens": [5] * 3000}, "3,000 tokens; the context holds 2,048"),
        ("/v1/completions", {"prompt": "a", "stop": "b" * 1025}, "1,024 characters"),
        ("/v1/messages", {"max_tokens": 1, "messages": [SAID], "stop_sequences": ["b" * 1025]}, "at most 1024"),
    ],
)
def test_a_body_cannot_keep_the_server_from_others(client, path, body, message):
    """Checks and templates run where all streams do, so that what they work on is bounded in number, too."""
    answer = client.post(path, json={"model": "stub"} | body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert "more)" not in answer.json()["error"]["message"] or len(body) < 100


def test_half_of_a_character_is_no_text(client):
    headers = {"content-type": "application/json"}
    answer = client.post("/tokenize", content=b'{"prompt": "a\\ud800"}', headers=headers)
    assert answer.status_code == 400
    assert "at index 1, which is half of a character" in error_of(answer)["message"]


def test_a_body_that_does_not_say_that_it_is_json_is_told_so(client):
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
        assert answer.status_code == 400
        assert 'with the header "Content-Type: application/json"' in error_of(answer)["message"]


def test_a_model_that_is_not_served_is_told_404(client):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        answer = client.post(path, json={"model": "gpt-4"} | body)
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_errors_of_the_same_shape(client):
    answer = client.get("/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["type"] == "not_found_error"
    assert error_of(answer)["message"] == "there is no GET /v1/nothing here"
    answer = client.get("/tokenize")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert error_of(answer)["type"] == "invalid_request_error"
    assert error_of(answer)["message"] == "there is no GET /tokenize here; it takes POST"


def test_what_is_neither_a_response_nor_a_model_takes_no_get(client, stub_server):
    """A path under that of an id is unknown, unless it is an id."""
    for path in ("/v1/responses/compact", "/v1/responses/resp_1/input_items", "/v1/models/gpt-4", "/v1/models/stub/x"):
        answer = client.post(path, json={})
        assert answer.status_code == 404, path
        assert "allow" not in answer.headers
        assert "it takes" not in error_of(answer)["message"]
    assert client.get("/v1/responses/compact").status_code == 404
    for path, methods in (("/v1/responses/resp_1", "GET"), ("/v1/models/stub", "GET")):
        answer = client.post(path, json={})
        assert answer.status_code == 405
        assert methods in answer.headers["allow"]


def test_errors_under_messages_have_anthropics_shape(client):
    message = "there is no GET /v1/messages/nothing here"
    answer = client.get("/v1/messages/nothing")
    assert answer.status_code == 404
    request_id = answer.headers["request-id"]
    error = {"type": "not_found_error", "message": message}
    assert answer.json() == {"type": "error", "error": error, "request_id": request_id}
    answer = client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_each_answer_has_a_request_id(client):
    first, second = client.get("/health"), client.get("/v1/nothing")
    assert len({first.headers["x-request-id"], second.headers["x-request-id"]}) == 2
    assert first.headers["request-id"] == first.headers["x-request-id"]
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("request_id", ["a" * 129, "a b", "é".encode(), ""])
def test_a_request_id_that_would_spoil_logs_is_refused(client, request_id):
    answer = client.get("/health", headers={"X-Request-Id": request_id})
    assert answer.status_code == 400
    assert "1 to 128 characters" in error_of(answer)["message"]


def test_a_request_that_makes_the_engine_raise_ends_alone_with_500(client, stub_server):
    body = {"model": "stub", "prompt": "abc", "max_tokens": 50}
    expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    for cue in ("!refuse", "!raise"):
        answer = client.post("/v1/completions", json=body | {"prompt": cue})
        assert answer.status_code == 500, answer.text
        assert error_of(answer)["type"] == "server_error"
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
    assert stub_server.process.num_restarts == 0


def test_a_defect_is_logged_and_the_client_is_told_nothing_of_it(client, stub_server, monkeypatch, caplog):
    async def fail(*args: object, **options: object) -> None:
        raise RuntimeError("cannot open /home/operator/secret")

    monkeypatch.setattr(stub_server.app.state.server.encoder, "encode", fail)
    monkeypatch.setattr(logging.getLogger("jaxllm"), "propagate", True)
    for path in ("/tokenize", "/v1/completions"):
        answer = client.post(path, json={"model": "stub", "prompt": "a"})
        assert answer.status_code == 500
        assert error_of(answer)["code"] == "internal_error"
        assert "secret" not in answer.text
    assert caplog.text.count("RuntimeError: cannot open /home/operator/secret") == 2


def test_other_origins_are_let_in_only_when_told(start_stub, client):
    origin = {"Origin": "https://chat.example.org"}
    assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    server = start_stub(cors_origins=[origin["Origin"]])
    answer = httpx.get(server.url + "/health", headers=origin)
    assert answer.headers["access-control-allow-origin"] == origin["Origin"]
    other = httpx.get(server.url + "/health", headers={"Origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in other.headers
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = httpx.options(server.url + "/v1/chat/completions", headers=origin | asked)
    assert answer.status_code == 200
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    answer = httpx.post(server.url + "/tokenize", content=b"{", headers=origin)
    assert answer.headers["access-control-allow-origin"] == origin["Origin"], "a page must be able to read errors"


def test_tls(start_stub, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl, which makes the certificate, is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-keyout", str(key), "-out", str(cert), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    server = start_stub(tls_cert=str(cert), tls_key=str(key))
    assert server.url.startswith("https://")
    answer = httpx.get(server.url + "/health", verify=ssl.create_default_context(cafile=str(cert)))
    assert answer.json() == {"status": "ok"}
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health")


def test_the_log_level_can_be_changed(client, admin_headers):
    logger = logging.getLogger("jaxllm")
    before = logger.level
    try:
        answer = client.post("/admin/log_level", json={"level": "debug"}, headers=admin_headers)
        assert answer.json() == {"level": "debug"}
        assert logger.level == logging.DEBUG
        answer = client.post("/admin/log_level", json={"level": "loud"}, headers=admin_headers)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "level"
    finally:
        logger.setLevel(before)


def test_an_operator_can_end_a_request(client, admin_headers, stub_server):
    streaming = Streaming(stub_server.url, 1000)
    streaming.wait_until_begun()
    request_id = streaming.chunks[0]["id"]
    aborted = client.post("/admin/abort", json={"request_id": request_id}, headers=admin_headers)
    assert aborted.json() == {"aborted": True}
    streaming.wait(2.0)
    assert len(streaming.chunks) < 100
    answer = client.post("/admin/abort", json={"request_id": request_id}, headers=admin_headers)
    assert answer.status_code == 404


def test_the_prefix_cache_can_be_reset(client, stub_server, admin_headers):
    body = {"model": "stub", "prompt": "abcdefgh" * 20, "max_tokens": 1}

    def num_cached() -> int:
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    num_cached()
    assert num_cached() > 0
    assert client.post("/admin/reset_prefix_cache", headers=admin_headers).json() == {"reset": True}
    assert num_cached() == 0


def test_the_prefix_cache_is_kept_while_requests_run_unless_forced(client, stub_server, admin_headers):
    streaming = Streaming(stub_server.url, 30)
    streaming.wait_until_begun()
    refused = client.post("/admin/reset_prefix_cache", headers=admin_headers)
    assert refused.status_code == 409
    forced = client.post("/admin/reset_prefix_cache", json={"force": True}, headers=admin_headers)
    assert forced.json() == {"reset": True}
    streaming.assert_complete()


def test_the_profiler_starts_and_stops(client, admin_headers, tmp_path):
    def post(action: str, **body: str) -> httpx.Response:
        return client.post(f"/admin/profile/{action}", json=body or None, headers=admin_headers)

    assert post("stop").status_code == 400
    assert post("start", folder="relative").status_code == 400
    assert post("start", folder=str(tmp_path)).json() == {"folder": str(tmp_path)}
    assert post("start", folder=str(tmp_path)).status_code == 400
    assert post("stop").json() == {"stopped": True}


def test_the_api_describes_itself_without_help_from_other_hosts(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/models", "/health", "/ready", "/tokenize", "/admin/drain", "/v1/completions"} <= paths.keys()
    assert client.get("/docs").status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_nothing_of_a_request_waits_for_the_garbage_collector(stub_server, path):
    """A cycle would keep it and its connection until then, and make the collector stop all streams more often."""
    prompt = {"/v1/completions": {"prompt": "abc"}, "/v1/responses": {"input": "abc", "store": False}}
    body = {"model": "stub"} | prompt.get(path, {"messages": [{"role": "user", "content": "abc"}]})
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 5

    def ask(*, stream: bool, leaves: bool) -> None:
        with connect(stub_server.url) as client:
            client.sendall(post(path, body | {"stream": stream}, "connection: close"))
            if not leaves:
                assert read_all(client).startswith(b"HTTP/1.1 200")

    def ask_all(number: int) -> None:
        for _ in range(number):
            for stream, leaves in itertools.product((False, True), repeat=2):
                ask(stream=stream, leaves=leaves)
        stub_server.wait_until_idle()
        time.sleep(0.1)

    ask_all(1)
    gc.collect()
    gc.disable()
    try:
        ask_all(10)
        assert gc.collect() < 40
    finally:
        gc.enable()
