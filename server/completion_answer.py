"""The answer of /v1/completions, whole or in chunks."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import Request

from jaxllm import OutputDelta
from jaxllm.server.call import Call
from jaxllm.server.generation import Generation, gather
from jaxllm.server.generation_group import close_all, merged_deltas
from jaxllm.server.protocol.completions import Completion, CompletionRequest, Prompt
from jaxllm.server.protocol.logprobs import CompletionLogprobsWriter
from jaxllm.server.protocol.usage import Usage
from jaxllm.server.streaming import DONE, ChunkWriter, encode_json

if TYPE_CHECKING:
    from jaxllm.server.app import Server

_PLAIN_CHUNK_TAIL = b',"logprobs":null,"finish_reason":null}'


class CompletionAnswer:
    """The continuations of one or several prompts, while the engine makes them. Read it once, by `whole` or by
    `events`."""

    def __init__(
        self, server: "Server", body: CompletionRequest, id_: str, generations: list[Generation], echoed: list[str]
    ) -> None:
        """`echoed`: what goes before the text of each prompt's choices."""
        self._llm = server.llm
        self._body = body
        self._id = id_
        self._created = int(time.time())
        self._generations = generations
        self._echoed = echoed

    @classmethod
    async def start(cls, server: "Server", request: Request, call: Call, body: CompletionRequest) -> "CompletionAnswer":
        """Gives the prompts to the engine: all of them, or none. Raises what `Generation.start` does."""
        id_ = f"cmpl-{uuid4().hex}"
        generations: list[Generation] = []
        echoed: list[str] = []
        try:
            for prompt in body.prompt:
                token_ids, text = await _token_ids(server, prompt), prompt if isinstance(prompt, str) else None
                generations.append(
                    await Generation.start(
                        server,
                        request,
                        call,
                        token_ids,
                        body.to_sampling_params(room=server.llm.info.max_model_len - len(token_ids)),
                        cache_salt=body.cache_salt or "",
                        request_id=id_,  # the same for all, so that an operator can end them by it
                        is_streamed=bool(body.stream),
                    )
                )
                echoed.append(_text_of(server, text, token_ids) if body.echo else "")
        except BaseException:
            await close_all(generations)
            raise
        return cls(server, body, id_, generations, echoed)

    async def whole(self) -> Completion:
        """Waits for all choices. Raises what `Generation.deltas` does."""
        try:
            answers = await asyncio.gather(*map(gather, self._generations))
        finally:
            await close_all(self._generations)
        choices = [(number, choice) for number, choices in enumerate(answers) for choice in choices]
        return Completion.model_validate(
            self._fields()
            | {
                "choices": [
                    {
                        "index": index,
                        "text": self._echoed[number] + choice.text,
                        "logprobs": None if choice.logprobs is None else self._logprobs_writer().write(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                        "stop_reason": choice.stop_reason,
                    }
                    for index, (number, choice) in enumerate(choices)
                ],
                "usage": Usage.of(self._generations),
            }
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks as server-sent events. Raises what `Generation.deltas` does."""
        include_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        writer = ChunkWriter(self._fields(), include_usage=include_usage)
        num_choices = self._generations[0].params.n
        heads = [b'{"index":%d,"text":' % index for index in range(num_choices * len(self._generations))]
        logprobs_writers = [self._logprobs_writer() for _ in heads]
        waiting_echoes = {
            index: self._echoed[index // num_choices] for index in range(len(heads) * bool(self._body.echo))
        }
        try:
            async with aclosing(merged_deltas(self._generations)) as deltas:
                async for delta in deltas:
                    index = delta.index
                    text = waiting_echoes.pop(index, "") + delta.text
                    if delta.logprobs is None and delta.finish_reason is None:
                        if text:
                            yield writer.chunk(heads[index] + encode_json(text) + _PLAIN_CHUNK_TAIL)
                    else:
                        yield writer.chunk(_choice(index, text, delta, logprobs_writers[index]))
            yield (writer.usage(Usage.of(self._generations)) if include_usage else b"") + DONE
        finally:
            await close_all(self._generations)

    def _fields(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._body.model}

    def _logprobs_writer(self) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._llm.token_text, self._body.logprobs or 0)


def _choice(index: int, text: str, delta: OutputDelta, logprobs_writer: CompletionLogprobsWriter) -> bytes:
    choice = {
        "index": index,
        "text": text,
        "logprobs": None if delta.logprobs is None else logprobs_writer.write(delta.logprobs),
        "finish_reason": delta.finish_reason,
    }
    return encode_json(choice if delta.finish_reason is None else choice | {"stop_reason": delta.stop_reason})


async def _token_ids(server: "Server", prompt: Prompt) -> list[int]:
    return await server.encoder.encode(prompt) if isinstance(prompt, str) else prompt


def _text_of(server: "Server", text: str | None, token_ids: list[int]) -> str:
    if text is not None:
        return text
    decoded = server.llm.tokenizer.decode(token_ids)
    assert isinstance(decoded, str)
    return decoded
