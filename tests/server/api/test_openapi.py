"""The description at /openapi.json holds: schemathesis asks for what it allows, and for what it does not."""

from collections import defaultdict

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


SETTINGS = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
OF_PROMPTS = {"model", "prompt", "add_special_tokens", "return_token_strs"}  # in /tokenize


def make_servable(case):
    """What no generator of examples would guess: the model's name, a length that takes no time, and headers that are
    not "null", which OpenAPI allows where a header is optional."""
    case.headers.clear()
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "stub"
    path, body = case.operation.path, case.body
    if not isinstance(body, dict) or path not in (*LENGTHS, "/tokenize"):
        return
    if isinstance(body.get("messages"), list):  # What belongs together with a tool's call is not in the schema.
        of_users = [m for m in body["messages"] if m.get("role") == "user" and m.get("content")]
        body["messages"] = of_users or [{"role": "user", "content": "a"}]
    if path != "/tokenize":
        body[LENGTHS[path]] = 4
    elif body.get("messages"):  # It takes a prompt or messages.
        body.pop("prompt", None)
    else:
        case.body = {"prompt": "a"} | {name: value for name, value in body.items() if name in OF_PROMPTS}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "not allowed"])
def test_the_description_holds(stub_server, admin_headers, mode):
    schema = schemathesis.openapi.from_url(stub_server.url + "/openapi.json")
    schema = schema.exclude(path_regex="^/admin/(un)?drain$")  # It would refuse all others.
    failures: list[str] = []
    answered: dict[int, set[str]] = defaultdict(set)
    for operation in schema.get_all_operations():

        @SETTINGS
        @given(case=operation.ok().as_strategy(generation_mode=mode))
        def holds(case):
            if mode is GenerationMode.POSITIVE:
                make_servable(case)
            answer = case.call_and_validate(checks=CHECKS, headers=admin_headers, timeout=60)
            answered[answer.status_code].add(case.operation.label)

        try:
            holds()
        except Unsatisfiable:  # It takes nothing, so nothing is wrong.
            assert mode is GenerationMode.NEGATIVE
        except Exception as failure:
            failures.append(f"{operation.ok().label}: {failure}")
    assert not failures, "\n\n".join(failures)
    if mode is GenerationMode.POSITIVE:
        expected = {f"POST {path}" for path in (*LENGTHS, "/tokenize", "/detokenize")} | {"GET /live"}
        assert expected <= answered[200]
