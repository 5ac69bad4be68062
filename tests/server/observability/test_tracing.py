"""Traces, as a collector gets them."""

import http.server
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from jaxllm import ConfigError, SamplingParams
from jaxllm.server.observability.finished_request import FinishedRequest
from jaxllm.server.observability.tracing import Tracing

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP, as `url`; `spans()` are those that have come."""

    def __init__(self) -> None:
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.requests.append((self.path, trace_service.ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args) -> None:
                pass

        self.requests: list[tuple[str, object]] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def spans(self) -> list:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes_of(span) -> dict:
    def value_of(value):
        kind = value.WhichOneof("value")
        return [value_of(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: value_of(attribute.value) for attribute in span.attributes}


def finished(**facts) -> FinishedRequest:
    now = time.monotonic()
    return FinishedRequest(
        **{
            "request_id": "r-1",
            "endpoint": "/v1/chat/completions",
            "params": SamplingParams(max_tokens=8, temperature=0.5, top_p=0.9, seed=3),
            "num_prompt_tokens": 12,
            "num_cached_tokens": 8,
            "output_lens": [5],
            "finish_reasons": ["stop"],
            "received": now - 3.0,
            "first_scheduled": now - 2.75,
            "first_token": now - 2.0,
            "finished": now,
        }
        | facts
    )


def sent(collector: Collector, request: FinishedRequest):
    """The span of this request, as it arrives."""
    tracing = Tracing(collector.url, model_name="m")
    tracing.finished(request)
    tracing.close()
    (span,) = collector.spans()
    return span


def test_a_span_says_what_the_conventions_ask_for(collector):
    span = sent(collector, finished(tenant="research"))
    assert [path for path, _ in collector.requests] == ["/v1/traces"]
    assert span.name == "chat m"
    attributes = attributes_of(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "jaxllm",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "jaxllm.tenant": "research",
    }
    assert {name: attributes[name] for name in expected} == expected
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(1.0)
    assert "error.type" not in attributes
    assert "gen_ai.request.choice.count" not in attributes


def test_names_are_those_of_the_conventions():
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = set(Tracing("http://127.0.0.1:9", model_name="m")._attributes(finished(params=SamplingParams(n=2, top_k=3))))
    ours = {name for name in used if name.startswith("gen_ai.") and not name.startswith("gen_ai.latency.")}
    assert ours
    assert ours <= known


def test_a_span_has_the_times_of_its_request(collector):
    wall_clock = time.time()
    span = sent(collector, finished())
    assert span.end_time_unix_nano / 1e9 == pytest.approx(wall_clock, abs=2.0)
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(3.0, abs=1e-3)
    events = {event.name: (event.time_unix_nano - span.start_time_unix_nano) / 1e9 for event in span.events}
    assert events == pytest.approx({"first step": 0.25, "first token": 1.0}, abs=1e-3)


def test_a_span_belongs_to_the_trace_of_the_client(collector):
    span = sent(collector, finished(trace_headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}))
    assert span.trace_id.hex() == TRACE_ID
    assert span.parent_span_id.hex() == PARENT_ID


def test_an_error_is_one_in_the_trace_too(collector):
    span = sent(collector, finished(finish_reasons=["error"], error="the step failed", first_token=None))
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.status.message == "the step failed"
    assert attributes_of(span)["error.type"] == "server_error"
    assert [event.name for event in span.events] == ["first step"]


def test_completions_are_told_apart_from_chats(collector):
    assert sent(collector, finished(endpoint="/v1/completions")).name == "text_completion m"


def test_without_the_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r'pip install "jaxllm\[otel\]"'):
        Tracing("http://localhost:4318", model_name="m")


def test_a_live_server_sends_its_traces(start_stub, collector):
    server = start_stub(otlp_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "X-Request-Id": "mine-1"}
    body = {"model": "stub", "prompt": "abc", "max_tokens": 4}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).raise_for_status()
    server.wait_for(collector.spans, timeout_s=15.0)  # spans are sent in batches, every five seconds
    (span,) = collector.spans()
    attributes = attributes_of(span)
    assert span.trace_id.hex() == TRACE_ID
    assert attributes["gen_ai.response.id"] == "mine-1"
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["http.route"] == "/v1/completions"
