"""The answer of /v1/completions, whole or in chunks."""

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import Request

from jaxllm import OutputDelta, TokenLogprobs
from jaxllm.server.api.answers.chunk_writer import DONE, ChunkWriter, error_events
from jaxllm.server.api.call import Call
from jaxllm.server.api.generation.deltas import gather
from jaxllm.server.api.generation.generation import Generation
from jaxllm.server.api.generation.generation_group import GenerationGroup
from jaxllm.server.api.json_body import encode_json
from jaxllm.server.api.protocol.completions import DEFAULT_MAX_TOKENS, Completion, CompletionRequest, Prompt
from jaxllm.server.api.protocol.logprobs import CompletionLogprobsWriter, token_namer
from jaxllm.server.api.protocol.usage import Usage, usage_so_far

if TYPE_CHECKING:
    from jaxllm.server.api.generation.deltas import DeltaSource
    from jaxllm.server.api.server import Server

_PLAIN_CHUNK_TAIL = b',"logprobs":null,"finish_reason":null}'


class CompletionAnswer:
    """The continuations of one or several prompts, while the engine makes them: `whole`, or the writer of their stream
    (`EventWriter`).

    source: of what the engine makes.
    """

    def __init__(
        self,
        server: "Server",
        body: CompletionRequest,
        id_: str,
        generations: list[Generation],
        prompts: list[list[int]],
        echoed: list[str],
    ) -> None:
        """`prompts`, `echoed`: the tokens of each generation's prompt, and what goes before the text of its choices."""
        self.source: DeltaSource = generations[0] if len(generations) == 1 else GenerationGroup(generations)
        self._llm = server.llm
        self._body = body
        self._id = id_
        self._created = int(time.time())
        self._generations = generations
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._writer = ChunkWriter(self._fields(), include_usage=self._include_usage)
        self._heads = [b'{"index":%d,"text":' % index for index in range(self.source.num_choices)]
        num_choices = self.source.num_choices // len(generations)
        self._prompts = [prompt for prompt in prompts for _ in range(num_choices)]
        self._echoes = [echo for echo in echoed for _ in range(num_choices)]
        self._counts = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._tells_of_tokens = self._counts or bool(body.return_token_ids)
        self._num_tokens = [0] * self.source.num_choices
        wants_logprobs = body.logprobs is not None
        self._logprobs_writers = [self._logprobs_writer(prompt) for prompt in self._prompts] if wants_logprobs else []

    @classmethod
    async def start(cls, server: "Server", request: Request, call: Call, body: CompletionRequest) -> "CompletionAnswer":
        """Gives the prompts to the engine: all of them, or none. Raises what `Generation.start` does."""
        id_ = f"cmpl-{uuid4().hex}"
        generations: list[Generation] = []
        prompts: list[list[int]] = []
        echoed: list[str] = []
        try:
            for prompt in body.prompt:
                text = prompt if isinstance(prompt, str) else None
                token_ids = await _token_ids(server, prompt, add_special_tokens=body.add_special_tokens is not False)
                generations.append(
                    await Generation.start(
                        server,
                        request,
                        call,
                        token_ids,
                        body.to_sampling_params(),
                        default_max_tokens=DEFAULT_MAX_TOKENS,
                        request_id=id_,  # the same for all, so that an operator can end them by it
                        is_streamed=bool(body.stream),
                    )
                )
                prompts.append(token_ids)
                echoed.append(_text_of(server, text, token_ids) if body.echo else "")
        except BaseException:
            GenerationGroup(generations).close()
            raise
        return cls(server, body, id_, generations, prompts, echoed)

    async def whole(self) -> Completion:
        """Waits for all choices. Raises what `Generation.take` does."""
        choices = [
            {
                "index": choice.index,
                "text": self._echoes[choice.index] + choice.text,
                "logprobs": self._logprobs_of(choice.index, choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            | self._ids_of(choice.index, choice.token_ids)
            for choice in await gather(self.source)
        ]
        return Completion.model_validate(self._fields() | {"choices": choices, "usage": Usage.of(self._generations)})

    def begin(self) -> bytes:
        return b""

    def add(self, delta: OutputDelta) -> bytes:
        index = delta.index
        text, self._echoes[index] = self._echoes[index] + delta.text, ""
        if self._tells_of_tokens or delta.logprobs is not None or delta.finish_reason is not None:
            return self._chunk(index, text, delta)
        if not text:
            return b""
        return self._writer.chunk(self._heads[index] + encode_json(text) + _PLAIN_CHUNK_TAIL)

    async def end(self) -> bytes:
        return (self._writer.usage(Usage.of(self._generations)) if self._include_usage else b"") + DONE

    fail = staticmethod(error_events)

    def _chunk(self, index: int, text: str, delta: OutputDelta) -> bytes:
        """Of one delta in general."""
        choice = _choice(index, text, delta, self._logprobs_of(index, delta.logprobs))
        if not self._tells_of_tokens:
            return self._writer.chunk(encode_json(choice))
        choice |= self._ids_of(index, delta.token_ids)
        self._num_tokens[index] += len(delta.token_ids)
        usage = usage_so_far(len(self._prompts[index]), self._num_tokens[index])
        return self._writer.chunk_with(encode_json(choice), {"usage": usage} if self._counts else {})

    def _ids_of(self, index: int, token_ids: list[int]) -> dict[str, list[int]]:
        """The fields with the ids of these tokens, which are the next, where they are asked for. The first bring those
        of the prompt."""
        if not self._body.return_token_ids:
            return {}
        prompt = {} if self._num_tokens[index] else {"prompt_token_ids": self._prompts[index]}
        return prompt | {"token_ids": token_ids}

    def _fields(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._body.model}

    def _logprobs_writer(self, prompt: list[int]) -> CompletionLogprobsWriter:
        skip_special_tokens = self._body.skip_special_tokens is not False
        detokenizer = self._llm.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
        name_of = token_namer(self._llm.token_text, as_token_ids=bool(self._body.return_tokens_as_token_ids))
        return CompletionLogprobsWriter(name_of, self._body.logprobs or 0, detokenizer.append_one)

    def _logprobs_of(self, index: int, logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        """Of the next tokens of a choice."""
        return None if logprobs is None else self._logprobs_writers[index].write(logprobs)


def _choice(index: int, text: str, delta: OutputDelta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
    }
    return choice if delta.finish_reason is None else choice | {"stop_reason": delta.stop_reason}


async def _token_ids(server: "Server", prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return await server.encoder.encode(prompt, add_special_tokens=add_special_tokens)


def _text_of(server: "Server", text: str | None, token_ids: list[int]) -> str:
    if text is not None:
        return text
    decoded = server.llm.tokenizer.decode(token_ids)
    assert isinstance(decoded, str)
    return decoded
