"""From the text of a prompt to its token ids, without holding up the streams of others."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from jaxllm import ControlTokens, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jaxllm import AsyncLLM

_MAX_INLINE_CHARACTERS = 4096  # about 1 ms of work; a thread costs less than waiting for more


class PromptEncoder:
    """Tokenizes as `LLM` does. Long texts are for a thread, in which the tokenizer runs without Python's lock; those
    that would not fit the context if they were made of the longest tokens only are not looked at.

    control_tokens: those of the tokenizer.
    """

    def __init__(self, llm: "AsyncLLM") -> None:
        self._tokenizer: Tokenizer = llm.tokenizer.backend_tokenizer
        self._max_model_len = llm.info.max_model_len
        self._max_characters = self._max_model_len * max(map(len, self._tokenizer.get_vocab()))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.control_tokens = ControlTokens(llm.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-tokenize")

    async def encode(self, text: str, *, name: str = "the prompt", add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, in which control tokens are control tokens.

        Raises InvalidRequestError, with `name`, for a text that is hopelessly long, or not Unicode: half of a surrogate
        pair, which JSON can spell, stands for no character.
        """
        return await self._run(text, name, lambda: self._encode(text, add_special_tokens))

    async def encode_parts(self, parts: Sequence[str], *, name: str, add_special_tokens: bool = False) -> list[int]:
        """The token ids of what `control_tokens.parts` gave. Raises what `encode` does."""
        token_ids = await self._run("".join(parts), name, lambda: self.control_tokens.encode(parts))
        if not add_special_tokens:
            return token_ids
        before, after = self._special_tokens
        return [*before, *token_ids, *after]

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Those that the tokenizer adds before and after a text."""
        plain, full = self._encode("a", False), self._encode("a", True)
        begin = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
        return full[:begin], full[begin + len(plain) :]

    async def _run(self, text: str, name: str, encode: Callable[[], list[int]]) -> list[int]:
        if len(text) > self._max_characters:
            raise InvalidRequestError(
                f"{name} has {len(text):,} characters; no more than {self._max_characters:,} can fit the context of "
                f"{self._max_model_len:,} tokens (max_model_len). Shorten it.",
                param="prompt",
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} has {text[error.start]!r} at index {error.start:,}, which is half of a character; "
                "it must be valid Unicode",
                param="prompt",
            ) from error
        if len(text) <= _MAX_INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of the tokenizer's calls, only those for batches let other threads run meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids
