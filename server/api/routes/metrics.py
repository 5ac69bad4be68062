"""GET /metrics: for Prometheus."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jaxllm.server.api.server import ServerDep

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=Response)  # in a thread: writing all the text takes milliseconds
def metrics(server: ServerDep) -> Response:
    """All metrics of the server, in Prometheus's text format."""
    return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)
