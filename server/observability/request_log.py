"""One line for each request."""

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from jaxllm.server.observability.finished_request import FinishedRequest
from jaxllm.server.server_config import ServerConfig

logger = logging.getLogger("jaxllm.server.requests")


class RequestLog:
    """Writes what a request was and how it went: neither its text nor its API key, only the key's name.

    config: its log_format is "text", for people, or "json": an object on each line.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._is_json = config.log_format == "json"

    def finished(self, request: FinishedRequest) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", _as_json(request) if self._is_json else _as_text(request))

    def refused(self, *, endpoint: str, request_id: str, status: int, message: str) -> None:
        """A request that was answered with an error before anything was generated for it."""
        if not logger.isEnabledFor(logging.INFO):
            return
        if self._is_json:
            fields = {"endpoint": endpoint, "status": status, "request_id": request_id, "error": message}
            logger.info("%s", _json("refusal", fields))
        else:
            logger.info("%s", f"{endpoint} {status} {request_id} · {message}")


def _as_text(request: FinishedRequest) -> str:
    reasons = ",".join(dict.fromkeys(request.finish_reasons))
    parts = [
        f"{request.endpoint} {reasons} {request.request_id}",
        f"prompt {request.num_prompt_tokens:,}"
        + f" ({request.num_cached_tokens:,} cached)" * (request.num_cached_tokens > 0),
        f"output {request.num_output_tokens:,}"
        + f" in {len(request.output_lens)} choices" * (len(request.output_lens) > 1),
        *(
            f"{name} {1e3 * seconds:,.1f} ms"
            for name, seconds in (("queue", request.queue_s), ("TTFT", request.ttft_s), ("TPOT", request.tpot_s))
            if seconds is not None
        ),
        f"total {request.e2e_s:,.3f} s",
        *(f"{name} {value}" for name, value in (("key", request.key_name), ("tenant", request.tenant)) if value),
        *([f"error: {request.error}"] if request.error else []),
    ]
    return " · ".join(parts)


def _as_json(request: FinishedRequest) -> str:
    fields = {
        "request_id": request.request_id,
        "endpoint": request.endpoint,
        "stream": request.is_streamed,
        "key_name": request.key_name,
        "tenant": request.tenant,
        "priority": request.priority,
        "finish_reasons": list(request.finish_reasons),
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "output_tokens": request.num_output_tokens,
        "max_tokens": request.params.max_tokens,
        "n": request.params.n,
        "temperature": request.params.temperature,
        "queue_ms": _ms(request.queue_s),
        "ttft_ms": _ms(request.ttft_s),
        "tpot_ms": _ms(request.tpot_s),
        "e2e_ms": _ms(request.e2e_s),
        "error": request.error,
    }
    return _json("request", fields)


def _json(event: str, fields: dict[str, Any]) -> str:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": time, "event": event, **fields}).decode()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
