"""The engine in the caller's own process: `LLM(model).generate(prompts)`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Prompt = str | Mapping[str, Any]
"""A text, {"prompt": text}, or {"prompt_token_ids": [...]}."""

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}."""

_DEFAULT_PARAMS = SamplingParams()


class LLM:
    """A model, ready to generate. Its calls and their options have vLLM's names.

        llm = LLM("smollm2-135m")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=32)):
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
        self._ids = itertools.count()

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt; all run together, and the outputs come in the order of the prompts.

        Args:
          prompts: one or several.
          sampling_params: for all, or one for each.
          use_tqdm: shows a progress bar with tokens/s.

        Raises InvalidRequestError before anything has run, naming the prompt that is at fault.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        _check_list("prompts", prompts)
        return self._run([self._tokenize(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, in the form that the model's chat template gives them."""
        _check_list("messages", messages)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._render(conversation, f"conversation {i}") for i, conversation in enumerate(conversations)]
        return self._run(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """The text of one answer, piece by piece, for a prompt or for a conversation.

        Closing the iterator aborts the request. Its `return` value (of `yield from`) is the RequestOutput.
        """
        is_prompt = isinstance(prompt, str | Mapping)
        text, token_ids = self._tokenize(prompt, "the prompt") if is_prompt else self._render(prompt, "the conversation")
        request_id = self._next_id()
        pieces: list[str] = []
        self.engine.add_request(
            request_id, token_ids, _checked(sampling_params), prompt=text, on_text=pieces.append
        )
        try:
            while True:
                finished = [output for output in self.engine.step() if output.request_id == request_id]
                yield from pieces
                pieces.clear()
                if finished:
                    return finished[0]
        finally:
            self.engine.abort_request(request_id)

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [_checked(sampling_params)] * len(prompts)
        else:
            params = [_checked(p) for p in sampling_params]
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts and {len(params)} sampling_params; give one for all, or one for each"
            )
        outputs: dict[str, RequestOutput | None] = {}
        try:
            for i, ((text, token_ids), p) in enumerate(zip(prompts, params, strict=True)):
                request_id = self._next_id()
                try:
                    self.engine.add_request(request_id, token_ids, p, prompt=text)
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"prompt {i}: {error}") from error
                outputs[request_id] = None
            with tqdm(total=len(prompts), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                num_tokens = 0
                while bar.n < len(prompts):
                    for output in self.engine.step():
                        outputs[output.request_id] = output
                        num_tokens += len(output.outputs[0].token_ids)
                        rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                        bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                        bar.update()
        except BaseException:  # Ctrl-C too: nothing of this call may run on.
            for request_id in outputs:
                self.engine.abort_request(request_id)
            raise
        return [output for output in outputs.values() if output is not None]

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
        return prompt, _non_empty(self.engine.tokenizer.encode(prompt), name)

    def _render(self, messages: Any, name: str) -> tuple[str, list[int]]:
        """(text, token ids) of a conversation with the beginning of the answer."""
        _check_list(name, messages)
        for message in messages:
            if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise InvalidRequestError(
                    f'{name} has the message {message!r}; it must be {{"role": text, "content": text}}'
                )
        tokenizer = self.engine.tokenizer
        if not tokenizer.chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use `generate` with a prompt in the form that it was trained on"
            )
        try:
            text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # Templates raise on what they do not accept, each in its own way.
            raise InvalidRequestError(f"{name} does not fit the model's chat template: {error}") from error
        return text, _non_empty(tokenizer.encode(text, add_special_tokens=False), name)


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return _DEFAULT_PARAMS
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"sampling_params is {params!r}; it must be a SamplingParams, or a list of them")
    return params


def _check_list(name: str, value: Any) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a list")


def _checked_token_ids(token_ids: Any, name: str) -> list[int]:
    try:
        ids = [int(token) for token in token_ids if not isinstance(token, bool | float | str)]
        if len(ids) == len(token_ids):
            return _non_empty(ids, name)
    except (TypeError, ValueError):
        pass
    raise InvalidRequestError(f"{name} has prompt_token_ids {token_ids!r}; they must be a list of integers")


def _non_empty(token_ids: list[int], name: str) -> list[int]:
    if not token_ids:
        raise InvalidRequestError(f"{name} is empty; it must have at least one token")
    return token_ids
