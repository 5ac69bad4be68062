"""API keys: who is let in, on whose account, and that no key is ever shown."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from raw_http import connect, post_head, read_all

from jaxllm import ConfigError, TenantConfig
from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.keys import ApiKeys, Caller

ALICE, BOB, ADMIN = "sk-alice-0123456789", "sk-bob-0123456789", "sk-admin-0123456789"
CONTENT = {
    "keys": [
        {"key": ALICE, "name": "alice", "tenant": "research", "priority": -1},
        {"key": BOB, "name": "bob"},
    ],
    "tenants": {"research": {"max_running": 8}, "bob": {"max_queued": 1, "max_running": 1}},
    "default_tenant": {"max_queued": 20},
}


@pytest.fixture
def write_keys(tmp_path):
    def write(content: object) -> str:
        path = tmp_path / "keys.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_each_key_is_mapped_to_its_tenant(write_keys):
    keys = ApiKeys.load(write_keys(CONTENT), ADMIN)
    assert keys.caller(ALICE) == Caller(tenant="research", priority=-1, key_name="alice")
    assert keys.caller(BOB) == Caller(tenant="bob", key_name="bob")
    assert keys.caller(ADMIN) == Caller(is_admin=True, key_name="admin")
    assert keys.tenants["research"] == TenantConfig(max_running=8)
    assert keys.default_tenant == TenantConfig(max_queued=20)


@pytest.mark.parametrize("key", [None, "", ALICE[:-1], ALICE + "0", "é" * 19, "\udc80"])
def test_whoever_has_no_key_is_told_401(write_keys, key):
    keys = ApiKeys.load(write_keys(CONTENT), ADMIN)
    with pytest.raises(ApiError) as error:
        keys.caller(key)
    assert error.value.status == 401
    assert error.value.type == "authentication_error"


def test_without_a_file_everybody_is_let_in_and_nobody_is_admin():
    keys = ApiKeys.load(None)
    assert keys.caller(None) == keys.caller("whatever") == Caller()
    assert not keys.have_admin
    keys = ApiKeys.load(None, ADMIN)
    assert keys.caller("whatever") == Caller()
    assert keys.caller(ADMIN).is_admin


def test_keys_are_not_kept():
    assert ADMIN not in repr(ApiKeys.load(None, ADMIN))
    assert ADMIN not in repr(vars(ApiKeys.load(None, ADMIN)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON in line 1"),
        ([], "must be a JSON object"),
        ({"keys": []}, "there are no keys"),
        ({"kyes": []}, "there is no field 'kyes'; the fields are default_tenant, keys, tenants"),
        ({"keys": {}}, "keys must be a list"),
        ({"keys": [{"name": "a"}]}, r"keys\[0\]: key missing"),
        ({"keys": [{"key": "é", "name": "a"}]}, r"keys\[0\] \(a\): a key must be printable ASCII"),
        ({"keys": [{"key": ALICE + " ", "name": "a"}]}, "without spaces"),
        ({"keys": [{"key": ALICE, "name": ""}]}, "name must be a text that is not empty"),
        ({"keys": [{"key": ALICE, "name": "a", "priority": "high"}]}, "priority is 'high'"),
        ({"keys": [{"key": ALICE, "name": "a"}, {"key": ALICE, "name": "b"}]}, "the same key is given to 'a'"),
        ({"keys": [{"key": ALICE, "name": "a", "quota": 1}]}, "there is no field 'quota'"),
        ({"keys": CONTENT["keys"], "tenants": {"bob": {"weight": 0}}}, "tenants.bob: weight is 0"),
        ({"keys": CONTENT["keys"], "tenants": {"bob": {"max_running": True}}}, "tenants.bob: max_running is True"),
        ({"keys": CONTENT["keys"], "default_tenant": 3}, "default_tenant must be a JSON object"),
    ],
)
def test_a_mistake_in_the_file_is_told_without_a_key(write_keys, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        ApiKeys.load(write_keys(content))
    assert ALICE not in str(error.value)


@pytest.mark.parametrize(("key", "is_short"), [("EMPTY", True), ("token-1", True), ("token-12", False)])
def test_a_short_key_is_warned_of_and_let_in(write_keys, caplog, key, is_short):
    with caplog.at_level("WARNING", "jaxllm"):  # which a test of /admin/log_level may have changed
        keys = ApiKeys.load(write_keys({"keys": [{"key": key, "name": "a"}]}))
    assert keys.caller(key).key_name == "a"
    assert ("fewer than 8 characters" in caplog.text) == is_short
    assert key not in caplog.text


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.json' cannot be read: No such file"):
        ApiKeys.load(str(tmp_path / "missing.json"))


@pytest.fixture
def guarded(start_stub, write_keys):
    return start_stub(api_keys_file=write_keys(CONTENT), admin_key=ADMIN)


def test_the_api_asks_for_a_key_and_operation_does_not(guarded):
    def status(path: str, **headers: str) -> int:
        return httpx.get(guarded.url + path, headers=headers).status_code

    assert status("/v1/models") == 401
    assert status("/v1/models", Authorization="Bearer wrong") == 401
    assert status("/v1/models", Authorization=f"Basic {ALICE}") == 401
    assert status("/v1/models", Authorization=f"Bearer {ALICE}") == 200
    assert status("/v1/models", Authorization=f"bearer  {ALICE}") == 200
    assert status("/v1/models", **{"X-Api-Key": BOB}) == 200
    for path in ("/health", "/ready", "/version", "/load", "/metrics"):
        assert status(path) == 200, path


def test_the_refusal_is_one_that_clients_know(guarded):
    answer = httpx.get(guarded.url + "/v1/models")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"] == {
        "message": 'no API key: send the header "Authorization: Bearer KEY"',
        "type": "authentication_error",
        "param": None,
        "code": "missing_api_key",
    }
    with (
        openai.OpenAI(base_url=guarded.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="this API key is not known here"),
    ):
        client.models.list()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/admin/drain", "/nothing"])
def test_without_a_key_a_body_is_not_even_read(guarded, path):
    with connect(guarded.url, timeout_s=5.0) as client:
        client.sendall(post_head(path, 1000, "authorization: Bearer wrong-key"))
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: Bearer" in answer.lower().replace(b"bearer", b"Bearer")


def test_admin_routes_need_the_admin_key(guarded):
    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.post(guarded.url + "/admin/undrain", headers=headers).status_code

    assert [status(key) for key in (None, "wrong", ALICE, ADMIN)] == [401, 401, 403, 200]


def test_admin_routes_are_closed_without_an_admin_key(start_stub):
    server = start_stub(admin_key=None)
    answer = httpx.post(server.url + "/admin/drain", headers={"Authorization": "Bearer x"})
    assert answer.status_code == 403
    assert "started without --admin-key" in answer.json()["error"]["message"]


def test_a_tenant_over_its_quota_is_told_429_and_others_are_served(guarded):
    def post(client: httpx.Client, key: str, max_tokens: int) -> httpx.Response:
        body = {"model": "stub", "prompt": "!slow", "max_tokens": max_tokens}
        return client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

    with httpx.Client(base_url=guarded.url, timeout=60) as client, ThreadPoolExecutor(4) as pool:
        first = pool.submit(post, client, BOB, 30)
        guarded.wait_for(lambda: guarded.llm.stats.scheduler.num_running == 1)
        second = pool.submit(post, client, BOB, 1)
        guarded.wait_for(lambda: guarded.llm.stats.scheduler.num_waiting == 1)
        third = post(client, BOB, 1)
        assert third.status_code == 429, third.text
        assert int(third.headers["retry-after"]) >= 1
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert "max_queued is 1" in third.json()["error"]["message"]
        assert post(client, ALICE, 1).status_code == 200
        assert [first.result().status_code, second.result().status_code] == [200, 200]
