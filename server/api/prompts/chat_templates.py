"""From a conversation to the prompt that the model was trained on."""

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta

from jaxllm import ConfigError, Conversation, InvalidRequestError
from jaxllm.server.api.prompts.prompt_encoder import PromptEncoder

if TYPE_CHECKING:
    from jaxllm import AsyncLLM
    from jaxllm.server.server_config import ServerConfig

# What a template gets from us or from transformers: everything else that it reads can be set by a request.
_GIVEN = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace")
)


class ChatTemplates:
    """The model's chat template, or the operator's in its place, and those of requests where they are allowed.

    Raises what `read_chat_template` does.
    """

    def __init__(self, llm: "AsyncLLM", config: "ServerConfig", encoder: PromptEncoder) -> None:
        self._tokenizer = llm.tokenizer
        self._encoder = encoder
        self._allow_request_template = config.allow_request_chat_template
        self._operators = read_chat_template(config)
        self._control_tokens = encoder.control_tokens
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        self._taken = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} | set(
            self._tokenizer.special_tokens_map
        )

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """The prompt and its token ids. A control token of the model that somebody has written into a message, a tool
        or a variable is text: nobody ends their turn with it, or speaks as somebody else.

        Args:
          messages: those of a `Conversation`.
          tools: JSON schemas of functions, in OpenAI's form.
          template: a request's own.
          kwargs: further variables of the template, as {"enable_thinking": False}.
          add_generation_prompt: ends with the beginning of the answer.
          continue_final_message: ends in the middle of the last message; not with `add_generation_prompt`.
          add_special_tokens: the tokenizer's own are added to those of the template.

        Raises InvalidRequestError: there is no template, a request's own is not allowed, it has no use for
        `tools` or one of the `kwargs`, or it does not accept the conversation.
        """

        def render(messages: Any, tools: Any, kwargs: Any) -> str:
            return self.render_text(
                messages,
                tools=tools,
                template=template,
                kwargs=kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )

        parts = self._control_tokens.parts(render, messages, tools, kwargs)
        token_ids = await self._encoder.encode_parts(
            parts, name="the conversation", add_special_tokens=add_special_tokens
        )
        return "".join(parts), token_ids

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt; see `render`."""
        if continue_final_message and not (messages and messages[-1].get("content")):
            message = "continue_final_message needs a last message with content, which the answer goes on with"
            raise InvalidRequestError(message, param="continue_final_message")
        if continue_final_message and messages[-1].get("tool_calls"):
            message = "the last message ends with tool_calls, which are complete; leave continue_final_message out"
            raise InvalidRequestError(message, param="continue_final_message")
        template = self._choose(template, tools)
        try:
            variables = _variables(template)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the chat template is not a Jinja template: {error}", param="chat_template"
            ) from error
        if tools and "tools" not in variables:
            raise InvalidRequestError(
                "this model's chat template has no place for tools, so that the model would never see them; leave "
                "tools out, or start the server with --chat-template and a template that reads `tools`",
                param="tools",
            )
        self._check_kwargs(kwargs or {}, variables)
        try:
            text = self._tokenizer.apply_chat_template(
                Conversation(messages).for_template(template),
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(kwargs or {}),
            )
        except Exception as error:  # Templates raise on what they do not accept, each in its own way.
            raise InvalidRequestError(
                f"the conversation does not fit the chat template: {error}", param="prompt"
            ) from error
        assert isinstance(text, str)
        return text

    def reads(self, variable: str) -> bool:
        """Whether the server's template does anything with this variable."""
        try:
            return variable in _variables(self._choose(None, None))
        except (InvalidRequestError, jinja2.TemplateError):
            return False

    def _choose(self, template: str | None, tools: Sequence[Any] | None) -> str:
        if template is not None:
            if not self._allow_request_template:
                raise InvalidRequestError(
                    "this server accepts no chat template from a request; leave chat_template out, or start the server "
                    "with --allow-request-chat-template",
                    param="chat_template",
                )
            return template
        if self._operators is not None:
            return self._operators
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt in the form that it was trained "
                "on, or start the server with --chat-template",
                param="prompt",
            )
        try:
            return self._tokenizer.get_chat_template(tools=list(tools) if tools else None)
        except ValueError as error:  # several, none of which is the default
            raise InvalidRequestError(str(error), param="prompt") from error

    def _check_kwargs(self, kwargs: Mapping[str, Any], variables: frozenset[str]) -> None:
        may_be_set = variables - _GIVEN - self._taken
        for name in kwargs:
            if name not in may_be_set:
                known = ", ".join(sorted(may_be_set)) or "none"
                raise InvalidRequestError(
                    f"the chat template reads no variable {name!r}; those that a request may set: {known}",
                    param=f"chat_template_kwargs.{name}",
                )


def read_chat_template(config: "ServerConfig") -> str | None:
    """The operator's. Raises ConfigError if it is not a Jinja template."""
    if config.chat_template is None:
        return None
    try:
        template = Path(config.chat_template).read_text(encoding="utf-8-sig")
        _variables(template)
    except (jinja2.TemplateError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {config.chat_template} is not a Jinja template: {error}") from error
    return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only has to be understood."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """The names that a template reads and does not define."""
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
