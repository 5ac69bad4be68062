"""Content that is a text, or a list of parts with texts."""

import json
from collections.abc import Collection
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from jaxllm.server.api.protocol.sampling import MAX_ITEMS, check_unicode


class TextContent:
    """Marks such a field; its value is the text, with a newline between parts, or None if it is null.

    types: of the parts, as "input_text".
    ignored: fields that parts may have and that do not concern the model.
    """

    def __init__(self, *types: str, ignored: Collection[str] = ()) -> None:
        self._types = types
        self._known = {"type", "text", *ignored}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        check = core_schema.no_info_plain_validator_function(self._check)
        is_optional = source is not str
        return core_schema.nullable_schema(check) if is_optional else check

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"enum": list(self._types)}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        null = [{"type": "null"}] if schema["type"] == "nullable" else []
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": part, "maxItems": MAX_ITEMS}, *null]}

    def _check(self, value: Any) -> str:
        if isinstance(value, str):
            return check_unicode(value)
        if not isinstance(value, list):
            raise PydanticCustomError("content", "it must be a text or a list of parts")
        if len(value) > MAX_ITEMS:
            numbers = {"given": len(value), "limit": MAX_ITEMS}
            raise PydanticCustomError("content", "it has {given} parts; it may have {limit}", numbers)
        return "\n".join(self._text_of(number, part) for number, part in enumerate(value))

    def _text_of(self, number: int, part: Any) -> str:
        place: dict[str, Any] = {"number": number}
        if not isinstance(part, dict):
            raise PydanticCustomError("content", "part {number} must be an object", place)
        if (kind := part.get("type")) not in self._types:
            place |= {"kind": json.dumps(kind)[:80], "types": " and ".join(map(json.dumps, self._types))}
            raise PydanticCustomError("content", "part {number} has the type {kind}; only {types} can be read", place)
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content", "part {number} has no text", place)
        for field, value in part.items():
            if field not in self._known and value is not None:
                place["field"] = json.dumps(field)[:80]
                raise PydanticCustomError("content", "part {number} has {field}, which is not supported", place)
        return check_unicode(part["text"])
