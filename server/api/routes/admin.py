"""For operators, with the admin key: drain, cache, abort, log level, profiler."""

import logging
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import Field

from jaxllm.server.api.errors import ApiError
from jaxllm.server.api.keys import authenticate_admin
from jaxllm.server.api.protocol.sampling import RequestModel
from jaxllm.server.api.server import ServerDep
from jaxllm.server.observability.logs import set_log_level

logger = logging.getLogger("jaxllm.server")
router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(authenticate_admin)])


class AbortRequest(RequestModel):
    request_id: str = Field(description='The "id" of the answer.')


class LogLevelRequest(RequestModel):
    level: Literal["debug", "info", "warning", "error"]


class ResetRequest(RequestModel):
    force: bool = Field(False, description="Also while requests run: they compute again what they shared.")


class ProfileRequest(RequestModel):
    folder: str = Field(min_length=1, description="Where to write the trace, on the server's machine.")


@router.post("/drain")
async def drain(server: ServerDep) -> dict[str, Any]:
    """Refuses new requests with 503 and lets those in progress finish. /ready says no meanwhile."""
    server.drain.start()
    logger.info("draining: %d requests are in progress", server.drain.board.total_active)
    return {"draining": True, "num_active": server.drain.board.total_active}


@router.post("/undrain")
async def undrain(server: ServerDep) -> dict[str, Any]:
    """Takes new requests again."""
    server.drain.end()
    logger.info("not draining any more")
    return {"draining": False, "num_active": server.drain.board.total_active}


@router.post("/reset_prefix_cache", responses={409: {"description": "Requests run, and force is false."}})
async def reset_prefix_cache(server: ServerDep, body: ResetRequest | None = None) -> dict[str, bool]:
    """Forgets what prompts began with, as after a change that the cache cannot know of."""
    force = body is not None and body.force
    if not await server.llm.reset_prefix_cache(force=force):
        message = 'requests run and hold cached pages; send {"force": true}, or wait until they have finished'
        raise ApiError(409, message, code="requests_running")
    return {"reset": True}


@router.post("/abort")
async def abort(server: ServerDep, body: AbortRequest) -> dict[str, bool]:
    """Ends a request, wherever it is. Its client gets what was generated, or an error."""
    if not await server.llm.abort(body.request_id):
        raise ApiError(404, f"no request {body.request_id!r} is in progress", param="request_id")
    return {"aborted": True}


@router.post("/log_level")
async def log_level(server: ServerDep, body: LogLevelRequest) -> dict[str, str]:
    """Changes how much the API workers and the engine log, until the server ends."""
    level = logging.getLevelNamesMapping()[body.level.upper()]
    server.drain.board.log_level = level
    set_log_level(level)
    return {"level": body.level}


@router.post("/profile/start")
async def start_profile(server: ServerDep, body: ProfileRequest) -> dict[str, str]:
    """Begins a trace of the engine by the JAX profiler, for TensorBoard or xprof."""
    folder = Path(body.folder)
    if not folder.is_absolute():
        raise ApiError(400, f"folder is {body.folder!r}; it must be an absolute path", param="folder")
    await server.llm.profile(str(folder))
    return {"folder": str(folder)}


@router.post("/profile/stop")
async def stop_profile(server: ServerDep) -> dict[str, bool]:
    """Ends the trace and writes it."""
    await server.llm.profile(None)
    return {"stopped": True}
