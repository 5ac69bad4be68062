"""For load balancers and their operators: /health, /ready, /version, /load."""

import platform
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from jaxllm import __version__
from jaxllm.server.api.server import ServerDep

router = APIRouter(tags=["health"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Whether this process answers; restart it if it does not. It says nothing of the engine: see /ready."""
    return {"status": "ok"}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"description": "Send requests elsewhere for now."}})
async def ready(server: ServerDep) -> JSONResponse:
    """Whether a request sent now would be served: the engine makes progress, and the server is not draining."""
    problem = server.drain.draining_error().message if server.drain.is_draining else server.watchdog.problem()
    body = {
        "ready": problem is None,
        "reason": problem,
        "engine": server.llm.state,
        "heartbeat_age_s": round(server.llm.heartbeat_age_s, 3),
        "draining": server.drain.is_draining,
    }
    return JSONResponse(body, 200 if problem is None else 503, {} if problem is None else {"retry-after": "1"})


@router.get("/version")
async def version(server: ServerDep) -> dict[str, str]:
    """Versions, and what the engine runs on."""
    info = server.llm.info
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": info.platform,
        "device": info.device,
    }


@router.get("/load")
async def load(server: ServerDep) -> dict[str, Any]:
    """How busy the server is.

    server_load: requests that the HTTP side is answering, of all API workers. num_running, num_waiting: in the engine,
    where a request with n choices counts n times.
    """
    scheduler = server.llm.stats.scheduler
    return {
        "server_load": server.drain.board.total_active,
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
    }
