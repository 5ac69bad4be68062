"""OpenTelemetry traces: a span for each request, sent by OTLP over HTTP.

Attributes follow the semantic conventions for generative AI,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/, and for what they lack, vLLM's `gen_ai.latency.*`.
"""

import time
from typing import TYPE_CHECKING, Any

from jaxllm import ConfigError, __version__

if TYPE_CHECKING:
    from jaxllm.server.observability.finished_request import FinishedRequest

_EXPORT_TIMEOUT_S = 3.0  # with all tries to send a batch; also what a dead collector may add to a shutdown
_OPERATIONS = {"/v1/completions": "text_completion"}  # all others are "chat"


class Tracing:
    """Makes a span of each request that has ended, and sends spans in batches from a thread of its own.

    endpoint: of the collector, such as "http://localhost:4318"; "/v1/traces" is added where it has no path.
    model_name: as clients call it.

    Raises ConfigError: the packages of the extra "otel" are not installed, or the endpoint is no URL.
    """

    def __init__(self, endpoint: str, *, model_name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"otlp_endpoint is {endpoint!r}, and the package {error.name!r}, which traces need, is not "
                'installed: pip install "jaxllm[otel]", or leave otlp_endpoint out'
            ) from error
        if endpoint.count("/") == 2 or endpoint.endswith(":4318/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({"service.name": "jaxllm", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("jaxllm.server", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def finished(self, request: "FinishedRequest") -> None:
        """Takes in a request. It belongs to the client's trace if the client sent the W3C's trace headers."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        to_wall_clock_ns = time.time_ns() - time.monotonic_ns()

        def at(monotonic_s: float) -> int:
            return int(monotonic_s * 1e9) + to_wall_clock_ns

        span = self._tracer.start_span(
            f"{_operation(request)} {self._model_name}",
            context=self._propagator.extract(dict(request.trace_headers)),
            kind=SpanKind.SERVER,
            start_time=at(request.received),
            attributes=self._attributes(request),
        )
        if request.first_scheduled is not None:
            span.add_event("first step", timestamp=at(request.first_scheduled))
        if request.first_token is not None:
            span.add_event("first token", timestamp=at(request.first_token))
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(end_time=at(request.finished))

    def close(self) -> None:
        """Sends what has not been sent, if the collector takes it within a few seconds."""
        self._provider.shutdown()

    def _attributes(self, request: "FinishedRequest") -> dict[str, Any]:
        params = request.params
        attributes = {
            "gen_ai.operation.name": _operation(request),
            "gen_ai.provider.name": "jaxllm",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": tuple(request.finish_reasons),
            "gen_ai.request.choice.count": params.n if params.n != 1 else None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
            "gen_ai.latency.time_in_queue": request.queue_s,
            "gen_ai.latency.time_to_first_token": request.ttft_s,
            "gen_ai.latency.time_in_model_prefill": request.prefill_s,
            "gen_ai.latency.time_in_model_decode": request.decode_s,
            "gen_ai.latency.e2e": request.e2e_s,
            "http.route": request.endpoint,
            "jaxllm.tenant": request.tenant or None,
            "jaxllm.stream": request.is_streamed,
            "error.type": "server_error" if request.error is not None else None,
        }
        return {name: value for name, value in attributes.items() if value is not None}


def _operation(request: "FinishedRequest") -> str:
    return _OPERATIONS.get(request.endpoint, "chat")
