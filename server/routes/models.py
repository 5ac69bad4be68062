"""What is served: /v1/models."""

import time
from typing import Any

from fastapi import APIRouter, Depends, Request

from jaxllm.server.keys import authenticate

router = APIRouter(tags=["models"], dependencies=[Depends(authenticate)])
_STARTED = int(time.time())


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All names under which the model is served."""
    server = request.app.state.server
    return {"object": "list", "data": [_describe(server, name) for name in server.model_names]}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One of them."""
    server = request.app.state.server
    server.check_model(model)
    return _describe(server, model)


def _describe(server: Any, name: str) -> dict[str, Any]:
    info = server.llm.info
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxllm",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
