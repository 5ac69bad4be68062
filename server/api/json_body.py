"""JSON as clients read it."""

from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

encode_json = msgspec.json.Encoder().encode
"""JSON without spaces; texts must be valid Unicode."""


def json_response(body: BaseModel | dict[str, Any]) -> Response:
    """A whole answer. Fields of a model that were not set are left out."""
    content = body.model_dump_json(exclude_unset=True) if isinstance(body, BaseModel) else encode_json(body)
    return Response(content, media_type="application/json")
