"""The server's options."""

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm import ConfigError

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_MINIMUMS = {
    "port": 0,
    "api_workers": 1,
    "max_body_bytes": 1,
    "max_prompt_tokens": 1,
    "default_max_tokens": 1,
    "max_stored_responses": 0,
}
_DURATIONS = (
    "request_timeout_s",
    "queue_timeout_s",
    "header_timeout_s",
    "body_timeout_s",
    "send_timeout_s",
    "stream_keep_alive_s",
    "watchdog_s",
)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
_METRIC_NAME = re.compile("([a-zA-Z_:][a-zA-Z0-9_:]*)?")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How to serve over HTTP. The fields name and explain the options of `jaxllm serve`.

    Raises ConfigError for a value that cannot be, or for a file that cannot be read.
    """

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all of IPv4, :: for all."""

    port: int = 8000
    """The port to listen on; 0 takes a free one and says which."""

    api_workers: int = 1
    """Processes that speak HTTP, tokenize and detokenize before the one engine."""

    served_model_name: Sequence[str] | None = None
    """What clients call the model; may be given several times. None: as the engine was told."""

    api_keys_file: str | None = None
    """JSON with the API keys and what their tenants get; without it no key is asked for."""

    admin_key: str | None = None
    """The key of the routes under /admin, which are closed without one; also read from JAXLLM_ADMIN_KEY."""

    max_body_bytes: int = 16 * 2**20
    """The largest body of a request; larger ones are refused with 413."""

    max_prompt_tokens: int | None = None
    """The longest prompt; None: as long as the model's context allows."""

    default_max_tokens: int | None = None
    """The longest answer to a request that sets no limit, and less where the context has less room. None: until the
    context is full, but 16 for /v1/completions, as OpenAI has it."""

    request_timeout_s: float | None = 3600.0
    """Ends a request that has not finished so long after it came; a client may ask for less. None: never."""

    queue_timeout_s: float | None = None
    """Ends a request that has not started so long after it came; a client may ask for less. None: never."""

    header_timeout_s: float = 15.0
    """Closes a connection whose request line and headers take longer to come."""

    body_timeout_s: float = 60.0
    """Refuses with 408 a request whose body takes longer to come."""

    send_timeout_s: float = 300.0
    """Closes a connection whose client has taken nothing of what waits for it for so long."""

    stream_keep_alive_s: float = 15.0
    """After so much silence, twice this at the most, a stream is sent a comment, so that proxies do not give it up."""

    cors_origins: Sequence[str] | None = None
    """A web origin whose pages may call the server, as https://chat.example.org; may be given several times; *
    for any. None: no other origin."""

    tls_cert: str | None = None
    """PEM file with the certificate (chain); with tls_key the server speaks HTTPS."""

    tls_key: str | None = None
    """PEM file with the key of tls_cert."""

    shutdown_timeout_s: float = 30.0
    """After SIGTERM running requests may finish for so long, and then end with an error. A second signal ends them
    at once."""

    watchdog_s: float = 20.0
    """/ready says no when the engine has made no progress for so long."""

    chat_template: str | None = None
    """File with a Jinja chat template in place of the model's own."""

    allow_request_chat_template: bool = False
    """Let a request bring its own chat template, which is a program that the server runs in a sandbox and waits for:
    only where all clients are trusted."""

    tool_call_parser: str | None = "auto"
    """How tool calls are found in the model's text: "hermes", "llama3_json", "mistral", "none", or "auto", which reads
    the chat template."""

    reasoning_parser: str | None = "auto"
    """How reasoning is told from the answer: "think", "none", or "auto", which reads the chat template."""

    max_stored_responses: int = 1000
    """Responses kept of each tenant for previous_response_id; those used least recently are dropped. 0 keeps none."""

    metrics_prefix: str = "jaxllm:"
    """What the names of the metrics begin with; "vllm:" for dashboards made for vLLM."""

    log_format: str = "text"
    """"text" or "json", a line for each request."""

    log_level: str = "info"
    """"debug", "info", "warning" or "error"."""

    ui: bool = True
    """Serve the web page at /."""

    otlp_endpoint: str | None = None
    """Where to send OpenTelemetry traces (OTLP over HTTP); needs the extra "otel". None: nowhere."""

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            if value is None and name in ("max_prompt_tokens", "default_max_tokens"):
                continue
            if type(value) is not int or value < minimum:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
        if self.port > 65535:
            raise ConfigError(f"port is {self.port:,}; the largest is 65,535")
        for name in _DURATIONS:
            value = getattr(self, name)
            if value is None and name in ("request_timeout_s", "queue_timeout_s"):
                continue
            if not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")
        if not (isinstance(self.shutdown_timeout_s, int | float) and 0 <= self.shutdown_timeout_s < float("inf")):
            raise ConfigError(f"shutdown_timeout_s is {self.shutdown_timeout_s!r}; it must be a number, 0 or more")
        for name, choices in (("log_format", LOG_FORMATS), ("log_level", LOG_LEVELS)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
        for name in ("served_model_name", "cors_origins"):
            value = getattr(self, name)
            if isinstance(value, str) or (value is not None and not all(value)):
                raise ConfigError(f"{name} is {value!r}; it must be a list of texts that are not empty, or None")
        for origin in self.cors_origins or ():
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origins has {origin!r}; it must be as https://chat.example.org, or *")
        if not _METRIC_NAME.fullmatch(self.metrics_prefix):
            raise ConfigError(f"metrics_prefix is {self.metrics_prefix!r}, with which no name in Prometheus can begin")
        if self.otlp_endpoint is not None and not re.match("https?://", self.otlp_endpoint):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; it must be a URL such as http://localhost:4318"
            )
        if self.admin_key == "":
            raise ConfigError("admin_key is empty, which anybody can guess; leave it out to close the admin routes")
        for name in ("tool_call_parser", "reasoning_parser"):
            if getattr(self, name) == "none":  # as it is written on the command line
                object.__setattr__(self, name, None)
        self._check_tls()
        for name in ("api_keys_file", "chat_template"):
            if (value := getattr(self, name)) is not None and not Path(value).is_file():
                raise ConfigError(f"{name} is {value!r}, and there is no such file")

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs tls_cert and tls_key: set both, or neither")
        if self.tls_cert is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"tls_cert {self.tls_cert!r} and tls_key {self.tls_key!r} cannot be used: {error}"
            ) from None

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None
