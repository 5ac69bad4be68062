"""The engine in the caller's own process: `LLM(model).generate(prompts)`."""

import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.control_tokens import ControlTokens
from jaxllm.conversation import Conversation
from jaxllm.engine.engine import Engine
from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Prompt = str | Mapping[str, Any]
"""A text, {"prompt": text}, or {"prompt_token_ids": [...]}."""

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant", "content": text}, or another form that `Conversation.add` takes."""

_DEFAULT_PARAMS = SamplingParams()


class LLM:
    """A model, ready to generate. Its calls and their options have vLLM's names.

        llm = LLM("smollm2-135m")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Args:
      model: a hub id, a folder, a .gguf file, or the demo model "smollm2-135m".
      progress: shows a bar while the weights are read.
      options: see `EngineConfig`.

    Raises:
      LoadingError: the model cannot be read; its subclasses say why.
      ConfigError: an option is unknown, out of range, or does not fit the model or the device.
      OutOfMemoryError: not even one sequence's pages fit beside the weights.
    """

    def __init__(self, model: str, *, progress: bool = False, **options: Any):
        self.engine = Engine(EngineConfig(model=model, **options), progress=progress)
        self._control_tokens = ControlTokens(self.engine.tokenizer)
        self._ids = itertools.count()
        self._finished: dict[str, RequestOutput] = {}  # for the call that waits for each

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continues each prompt; all run together, and the outputs come in the order of the prompts.

        Args:
          prompts: one or several.
          sampling_params: for all, or one for each.
          use_tqdm: shows a progress bar with tokens/s.
          options: of all requests; see `RequestOptions`.

        Raises InvalidRequestError before anything has run, naming the prompt that is at fault.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        _check_list("prompts", prompts)
        tokenized = [self._tokenize(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        return self._run(tokenized, sampling_params, RequestOptions(**options), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, in the form that the model's chat template gives them.

        A control token that somebody has written into a message is text. The arguments are those of `generate`.
        """
        _check_list("messages", messages)
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = [self._render(conversation, f"conversation {i}") for i, conversation in enumerate(conversations)]
        return self._run(prompts, sampling_params, RequestOptions(**options), use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **options: Any
    ) -> Generator[str, None, RequestOutput]:
        """The text of one answer, piece by piece, for a prompt or for a conversation.

        The options are those of `RequestOptions`. Closing the iterator aborts the request. Its `return` value (of
        `yield from`) is the RequestOutput.
        """
        if isinstance(prompt, str | Mapping):
            text, token_ids = self._tokenize(prompt, "the prompt")
        else:
            text, token_ids = self._render(prompt, "the conversation")
        params = _checked(sampling_params)
        if params.n > 1:
            raise InvalidRequestError(f"n is {params.n}; a stream is one answer. Leave n at 1, or use `generate`.")
        request_id = self._next_id()
        pieces: list[str] = []
        self.engine.add_request(
            request_id, token_ids, params, RequestOptions(**options), prompt=text, on_text=pieces.append
        )
        try:
            while True:
                yield from pieces
                pieces.clear()
                if request_id in self._finished:
                    return self._finished[request_id]
                self._step()
        finally:
            self._forget(request_id)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [_checked(sampling_params)] * len(prompts)
        else:
            _check_list("sampling_params", sampling_params)
            params = [_checked(p) for p in sampling_params]
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(params)} sampling_params; give one for all, or one for each"
            )
        request_ids = [self._next_id() for _ in prompts]
        try:
            for i, request_id in enumerate(request_ids):
                text, token_ids = prompts[i]
                try:
                    self.engine.add_request(request_id, token_ids, params[i], options, prompt=text)
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"prompt {i}: {error}") from error
            with tqdm(total=len(prompts), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                started_at, num_tokens, unfinished = time.monotonic(), 0, set(request_ids)
                while unfinished:
                    self._step()
                    for request_id in unfinished & self._finished.keys():
                        unfinished.remove(request_id)
                        num_tokens += sum(len(output.token_ids) for output in self._finished[request_id].outputs)
                        rate = num_tokens / (time.monotonic() - started_at)
                        bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                        bar.update()
            return [self._finished[request_id] for request_id in request_ids]
        finally:  # After Ctrl-C too, nothing of this call may run on.
            for request_id in request_ids:
                self._forget(request_id)

    def _step(self) -> None:
        """Runs a step of the engine, for all calls (streams may be open) whose requests are in it."""
        finished: list[RequestOutput] = []
        try:
            finished = self.engine.step()
        except BaseException:  # Ctrl-C too: the step is half done, and with it all requests.
            finished = self.engine.abort_all()
            raise
        finally:
            self._finished.update((output.request_id, output) for output in finished)

    def _forget(self, request_id: str) -> None:
        self.engine.abort_request(request_id)
        self._finished.pop(request_id, None)

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _tokenize(self, prompt: Any, name: str) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            if prompt.keys() == {"prompt_token_ids"}:
                return None, _checked_token_ids(prompt["prompt_token_ids"], name)
            if prompt.keys() == {"prompt"}:
                prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                f'{name} is {prompt!r}; it must be a text, {{"prompt": text}} or {{"prompt_token_ids": [ids]}}'
            )
        return prompt, _non_empty(self.engine.tokenizer.encode(_checked_text(prompt, name)), name)

    def _render(self, messages: Any, name: str) -> tuple[str, list[int]]:
        """(text, token ids) of a conversation with the beginning of the answer."""
        _check_list(name, messages)
        conversation = Conversation()
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InvalidRequestError(f'{name} has the message {message!r}; it must be {{"role": …, "content": …}}')
            try:
                conversation.add(message)
            except ValueError as error:
                raise InvalidRequestError(f"{name} has a message {number} that does not fit: {error}") from error
        tokenizer = self.engine.tokenizer
        if not tokenizer.chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use `generate` with a prompt in the form that it was trained on"
            )

        def render(messages: Any) -> str:
            template = tokenizer.get_chat_template()
            readable = Conversation(messages).for_template(template)
            return str(tokenizer.apply_chat_template(readable, tokenize=False, add_generation_prompt=True))

        try:
            parts = self._control_tokens.parts(render, conversation.messages)
        except Exception as error:  # Templates raise on what they do not accept, each in its own way.
            raise InvalidRequestError(f"{name} does not fit the model's chat template: {error}") from error
        text = _checked_text("".join(parts), name)
        return text, _non_empty(self._control_tokens.encode(parts), name)


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return _DEFAULT_PARAMS
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"sampling_params is {params!r}; it must be a SamplingParams, or a list of them")
    return params


def _check_list(name: str, value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a list")


def _checked_text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has {text[error.start]!r} at index {error.start:,}, which is half of a character; "
            "it must be valid Unicode"
        ) from error
    return text


def _checked_token_ids(token_ids: Any, name: str) -> list[int]:
    if not isinstance(token_ids, Sequence | np.ndarray) or isinstance(token_ids, str | bytes):
        raise InvalidRequestError(f"{name} has prompt_token_ids {token_ids!r}; they must be a list of integers")
    for i, token_id in enumerate(token_ids):
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise InvalidRequestError(f"{name} has {token_id!r} as token id {i}; it must be an integer")
    return _non_empty([int(token_id) for token_id in token_ids], name)


def _non_empty(token_ids: list[int], name: str) -> list[int]:
    if not token_ids:
        raise InvalidRequestError(f"{name} is empty; it must have at least one token")
    return token_ids
