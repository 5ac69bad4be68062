"""What is served: /v1/models, for the clients of OpenAI and of Anthropic at once."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from jaxllm.server.api.errors import ApiError, shown
from jaxllm.server.api.keys import authenticate
from jaxllm.server.api.server import Server, ServerDep

router = APIRouter(tags=["models"], dependencies=[Depends(authenticate)])
_STARTED = int(time.time())

Lifecycle = Literal["active", "deprecated", "retired"]


@router.get("/v1/models")
async def list_models(
    server: ServerDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="The most models to list.")] = 1000,
    after_id: Annotated[str | None, Query(description="List those behind this one.")] = None,
    before_id: Annotated[str | None, Query(description="List those before this one.")] = None,
    lifecycle: Annotated[list[Lifecycle] | None, Query(alias="lifecycle[]", description="All are active.")] = None,
) -> dict[str, Any]:
    """All names under which the model is served."""
    names = list(server.model_names) if lifecycle is None or "active" in lifecycle else []
    if after_id is not None:
        names = names[_index(names, "after_id", after_id) + 1 :]
    if before_id is not None:
        names = names[: _index(names, "before_id", before_id)]
    page = names[-limit:] if before_id is not None else names[:limit]
    return {
        "object": "list",
        "data": [_describe(server, name) for name in page],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": len(page) < len(names),
    }


@router.get("/v1/models/{model:path}")
async def get_model(server: ServerDep, model: str) -> dict[str, Any]:
    """One of them."""
    server.check_model(model)
    return _describe(server, model)


def _index(names: list[str], param: str, name: str) -> int:
    if name not in names:
        raise ApiError(400, f"{param} is {shown(name)}; it must be the id of a model in this list", param=param)
    return names.index(name)


def _describe(server: Server, name: str) -> dict[str, Any]:
    info = server.llm.info
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jaxllm",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
        # Anthropic's:
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(_STARTED, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": info.max_model_len,
        "max_tokens": info.max_model_len - 1,
    }
