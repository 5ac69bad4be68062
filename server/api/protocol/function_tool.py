"""Functions of the client's that the model may call, as every endpoint describes them to the chat template."""

import logging
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

logger = logging.getLogger("jaxllm.server")


def function_for_template(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """In the form of chat completions, which chat templates read. What the client leaves out is left out."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


@cache
def _tell_that_strict_is_not_enforced() -> None:
    logger.warning(
        "a tool has strict: true, which is taken and not enforced: the model may write arguments that do not fit the "
        "tool's schema (said once)"
    )


def _note_strict(value: bool | None) -> bool | None:
    if value:
        _tell_that_strict_is_not_enforced()
    return value


Strict = Annotated[
    bool | None,
    AfterValidator(_note_strict),
    Field(description="Changes nothing yet: arguments are not forced into the schema."),
]
"""What many clients ask for by default. The log says once that it is not enforced."""
