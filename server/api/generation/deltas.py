"""What the engine makes for an HTTP request, as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from jaxllm import CompletionOutput, OutputDelta


class DeltaSource(Protocol):
    """A `Generation`, or several together. It has one reader, which closes it."""

    @property
    def num_choices(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Whether the reader has taken all that it wants of every choice."""
        ...

    def listen(self, on_news: Callable[[], None]) -> None:
        """`on_news` is called when there is something to take, or an error to be raised."""
        ...

    def take(self) -> OutputDelta | None:
        """What is new of one choice, until there is nothing (None). Raises what `Generation.take` does."""
        ...

    def close(self) -> None:
        """Ends what still runs. May be called again."""
        ...


async def deltas(source: DeltaSource) -> AsyncGenerator[OutputDelta, None]:
    """All of them. In the end the source is closed. Raises what `Generation.take` does."""
    news = asyncio.Event()
    source.listen(news.set)
    try:
        while not source.is_complete:
            if (delta := source.take()) is not None:
                yield delta
            else:
                news.clear()
                await news.wait()
    finally:
        source.close()


async def gather(source: DeltaSource) -> list[CompletionOutput]:
    """All choices, when the last is complete. Raises what `Generation.take` does."""
    of_choices: list[list[OutputDelta]] = [[] for _ in range(source.num_choices)]
    async with aclosing(deltas(source)) as new:
        async for delta in new:
            of_choices[delta.index].append(delta)
    return [CompletionOutput.of(its_deltas) for its_deltas in of_choices]
