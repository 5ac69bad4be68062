"""Which of our models serves a checkpoint."""

from typing import Any

from jaxllm.errors import UnsupportedModelError
from jaxllm.models import gemma3, llama
from jaxllm.models.family import Family

FAMILIES: dict[str, Family] = llama.FAMILIES | gemma3.FAMILIES
"""By architecture, as config.json names it."""


def find_family(config_json: dict[str, Any]) -> Family:
    """The family of the first architecture that we know. Raises UnsupportedModelError, which lists those."""
    architectures = config_json.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"architecture {', '.join(architectures) or 'not named in the config'} is not supported; "
        f"supported: {', '.join(FAMILIES)}"
    )
