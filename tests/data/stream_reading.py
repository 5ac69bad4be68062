"""Reading an `OutputStream` to its end."""

from collections import defaultdict

from jaxllm import OutputDelta, OutputStream
from jaxllm.engine.text.output_stream import _merged


async def collect(stream: OutputStream) -> list[OutputDelta]:
    """All that was not read yet, as one delta for each continuation. One that was read to its end is not among them."""
    deltas = defaultdict(list)
    async for delta in stream:
        deltas[delta.index].append(delta)
    return [_merged(deltas[index]) for index in sorted(deltas)]
