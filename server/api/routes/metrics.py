"""GET /metrics: for Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=Response)  # in a thread: writing all the text takes milliseconds
def metrics(request: Request) -> Response:
    """All metrics of the server, in Prometheus's text format."""
    return Response(request.app.state.server.metrics.text(), media_type=CONTENT_TYPE_LATEST)
