"""What a body says of the end of the prompt that the chat template makes."""

from typing import Annotated

from pydantic import Field, model_validator

from jaxllm.server.api.protocol.sampling import RequestModel, contradiction


class TemplateFields(RequestModel):
    """Under vLLM's names."""

    add_generation_prompt: Annotated[
        bool | None,
        Field(description="End with the beginning of an answer. Default: true, without continue_final_message."),
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="End in the middle of the last message, which the answer goes on with.")
    ] = None

    @model_validator(mode="after")
    def _check_end(self) -> "TemplateFields":
        if self.add_generation_prompt and self.continue_final_message:
            message = "add_generation_prompt begins a new message, and continue_final_message goes on with the last one"
            raise contradiction("continue_final_message", message)
        return self

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
