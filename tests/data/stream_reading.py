"""Reading an `OutputStream` to its end."""

from collections import defaultdict

from jaxllm import OutputDelta, OutputStream


async def collect(stream: OutputStream) -> list[OutputDelta]:
    """All that was not read yet, as one delta for each continuation. One that was read to its end is not among them."""
    deltas = defaultdict(list)
    async for delta in stream:
        deltas[delta.index].append(delta)
    return [OutputDelta.joined(deltas[index]) for index in sorted(deltas)]
