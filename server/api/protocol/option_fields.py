"""The fields of a request that say how it is to be served, under vLLM's names."""

from typing import Annotated

from pydantic import Field

from jaxllm.server.api.protocol.sampling import RequestModel, Text


class OptionFields(RequestModel):
    """What a body may say of the `RequestOptions`."""

    priority: Annotated[
        int | None, Field(description="Added to the priority of the API key; 0 or more. Lower runs first.")
    ] = None
    cache_salt: Annotated[
        Text | None,
        Field(min_length=1, max_length=1024, description="Share cached prefixes with requests of the same salt only."),
    ] = None
