"""Request options none of which has its default."""

from jaxllm import RequestOptions

SAID = RequestOptions(priority=3, tenant="t", cache_salt="s", timeout_s=600.0, queue_timeout_s=300.0)
