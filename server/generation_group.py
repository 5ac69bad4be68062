"""Several generations on behalf of one HTTP request."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxllm import OutputDelta
from jaxllm.server.generation import Generation


async def merged_deltas(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """What is new of any of them, with its number, as it comes. Raises what `Generation.deltas` does, of the first
    that fails; the others are ended then. A reader that is slow makes them wait and their deltas grow."""
    if len(generations) == 1:
        async with aclosing(generations[0].deltas()) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, OutputDelta | Exception | None]] = asyncio.Queue(maxsize=len(generations))

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    await queue.put((number, delta))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    pumps = [asyncio.create_task(pump(number, generation)) for number, generation in enumerate(generations)]
    num_running = len(pumps)
    try:
        while num_running:
            number, new = await queue.get()
            if isinstance(new, Exception):
                raise new
            if new is None:
                num_running -= 1
            else:
                yield number, new
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
        await close_all(generations)


async def close_all(generations: Sequence[Generation]) -> None:
    """Ends those that still run."""
    for generation in generations:
        await generation.aclose()
