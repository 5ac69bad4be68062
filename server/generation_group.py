"""Several generations on behalf of one HTTP request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxllm import OutputDelta
from jaxllm.server.generation import Generation


def merged_deltas(generations: Sequence[Generation]) -> AsyncGenerator[OutputDelta, None]:
    """What is new of any of them, as it comes. A reader that is slow makes them wait and their deltas grow.

    The index of a delta counts the choices of all, those of the first generation first; all have as many. Raises what
    `Generation.deltas` does, of the first that fails; the others are ended then.
    """
    return generations[0].deltas() if len(generations) == 1 else _merged_deltas(generations)


async def _merged_deltas(generations: Sequence[Generation]) -> AsyncGenerator[OutputDelta, None]:
    queue: asyncio.Queue[OutputDelta | Exception | None] = asyncio.Queue(maxsize=len(generations))

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    delta.index += number * generation.params.n
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(number, generation)) for number, generation in enumerate(generations)]
    num_running = len(pumps)
    try:
        while num_running:
            new = await queue.get()
            if isinstance(new, Exception):
                raise new
            if new is None:
                num_running -= 1
            else:
                yield new
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
        await close_all(generations)


async def close_all(generations: Sequence[Generation]) -> None:
    """Ends those that still run."""
    for generation in generations:
        await generation.aclose()
