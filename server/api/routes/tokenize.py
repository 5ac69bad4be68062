"""Between text and tokens: /tokenize and /detokenize, under vLLM's names of the fields."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, model_validator

from jaxllm.server.api.errors import ApiError, blamed_as
from jaxllm.server.api.keys import authenticate
from jaxllm.server.api.prompts.chat_input import messages_for_template
from jaxllm.server.api.protocol.chat_completions import Message, Tool
from jaxllm.server.api.protocol.sampling import Items, RequestModel, contradiction
from jaxllm.server.api.protocol.template_fields import TemplateFields
from jaxllm.server.api.server import ServerDep

router = APIRouter(tags=["tokens"], dependencies=[Depends(authenticate)])

_MAX_INT32 = 2**31 - 1


class TokenizeRequest(TemplateFields):
    """A prompt, or messages for the chat template; one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's own, as <s>. Default: true for a prompt; a template brings its own."
    )
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise contradiction(
                "prompt" if self.messages is None else "messages", "give prompt or messages, and not both"
            )
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if self.messages is None and getattr(self, name) is not None:
                raise contradiction(name, f"{name} needs messages, for the chat template to render")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """As the vocabulary has them: a byte-level one writes a space as Ġ."""


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=_MAX_INT32)]], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    prompt: str


@router.post("/tokenize")
async def tokenize(server: ServerDep, body: TokenizeRequest) -> TokenizeResponse:
    """The tokens that a prompt, or messages under the chat template, would be for the model."""
    server.check_model(body.model)
    if body.messages is not None:
        with blamed_as({"prompt": "messages"}):
            _, token_ids = await server.templates.render(
                messages_for_template(body.messages),
                tools=[tool.for_template() for tool in body.tools or ()],
                template=None,
                kwargs=body.chat_template_kwargs or {},
                add_generation_prompt=body.begins_answer,
                continue_final_message=bool(body.continue_final_message),
                add_special_tokens=bool(body.add_special_tokens),
            )
    else:
        assert body.prompt is not None
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await server.encoder.encode(body.prompt, name="prompt", add_special_tokens=add_special_tokens)
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=server.llm.info.max_model_len,
        tokens=token_ids,
        token_strs=list(server.llm.tokenizer.convert_ids_to_tokens(token_ids)) if body.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(server: ServerDep, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text that tokens stand for, special ones included."""
    server.check_model(body.model)
    vocab_size, max_len = server.llm.info.vocab_size, server.llm.info.max_model_len
    if len(body.tokens) > max_len:
        message = f"there are {len(body.tokens):,} tokens; the context holds {max_len:,} (max_model_len). Send fewer."
        raise ApiError(400, message, param="tokens")
    for index, token_id in enumerate(body.tokens):
        if token_id >= vocab_size:
            message = f"tokens[{index}] is {token_id:,}; the vocabulary has {vocab_size:,} tokens"
            raise ApiError(400, message, param=f"tokens[{index}]")
    text = server.llm.tokenizer.decode(body.tokens)
    assert isinstance(text, str)
    return DetokenizeResponse(prompt=text)
