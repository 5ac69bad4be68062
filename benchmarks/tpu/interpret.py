"""Runs a Pallas TPU kernel in JAX's TPU interpret mode and counts: the bytes of its DMAs, and the trips of its loops.

Only what steers the kernel is computed; operations on floats are skipped, so that a step of thousands of pages takes
seconds. Interpret mode has no hook for counting: two private functions of JAX are wrapped. An AttributeError says so
where a version of JAX has them no more.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu


@dataclass
class Trips:
    """A loop of a kernel's code.

    Attributes:
      count: how often its body runs in all.
      loops: the loops in it, in their order.
      alternatives: how often each of its branches runs that has matrix products, the innermost of such, in their order.
    """

    count: float
    loops: list["Trips"] = field(default_factory=list)
    alternatives: list[float] = field(default_factory=list)

    def times(self, factor: float) -> "Trips":
        loops = [loop.times(factor) for loop in self.loops]
        return Trips(self.count * factor, loops, [n * factor for n in self.alternatives])


@dataclass
class Counts:
    """What a kernel does in a call.

    Attributes:
      dma_bytes, num_dmas: by (from, to), the names of memories: "hbm", "vmem", "smem".
      root: its loops. The root is the kernel itself.
    """

    dma_bytes: Counter[tuple[str, str]]
    num_dmas: Counter[tuple[str, str]]
    root: Trips

    @property
    def hbm_bytes(self) -> int:
        """Bytes that DMAs read from HBM or write to it."""
        return sum(n for route, n in self.dma_bytes.items() if "hbm" in route)


def count(function: Callable, *arguments: Any) -> Counts:
    """Calls a function of arrays, which makes and calls one Pallas kernel, and counts what the kernel does."""
    (counts,) = count_each(function, [arguments])
    return counts


def count_each(function: Callable, calls: Sequence[Sequence[Any]]) -> list[Counts]:
    """The same for several calls with arrays of the same shapes: the kernel is traced once."""
    bodies: Counter[int] = Counter()
    dma_bytes: Counter[tuple[str, str]] = Counter()
    num_dmas: Counter[tuple[str, str]] = Counter()
    kernels: dict[int, Any] = {}
    found = []
    params = pltpu.InterpretParams(skip_floating_point_ops=True, uninitialized_memory="zero")
    with _counting(bodies, dma_bytes, num_dmas, kernels), pltpu.force_tpu_interpret_mode(params):
        jitted = jax.jit(lambda *args: function(*args))
        for arguments in calls:
            for counter in (bodies, dma_bytes, num_dmas):
                counter.clear()
            jax.block_until_ready(jitted(*arguments))
            if len(kernels) != 1:
                raise ValueError(f"there are {len(kernels)} Pallas kernels in the call; expected one")
            (kernel,) = kernels.values()
            root = Trips(1, list(_loops(kernel, bodies)), list(_alternatives(kernel, bodies)))
            found.append(Counts(dma_bytes.copy(), num_dmas.copy(), root))
    return found


@contextmanager
def _counting(
    bodies: Counter[int],
    dma_bytes: Counter[tuple[str, str]],
    num_dmas: Counter[tuple[str, str]],
    kernels: dict[int, Any],
) -> Iterator[None]:
    interpret, write = interpreter._interpret_jaxpr, interpreter.DMA.execute_write
    names = {index: space.value for space, index in interpreter.TPU_MEMORY_SPACE_IDXS.items()}
    names = {index: "vmem" if name == "default" else name for index, name in names.items()}
    depth = 0

    def counted_interpret(jaxpr: Any, *args: Any, ctx: Any, token: Any) -> Any:
        nonlocal depth
        if depth == 0 and not jaxpr.outvars:  # Maps of blocks to indices are run too; they have results.
            kernels[id(jaxpr)] = jaxpr

        def note(token: np.ndarray) -> np.ndarray:
            bodies[id(jaxpr)] += 1
            return token

        token = io_callback(note, interpreter.TOKEN_SHAPE_DTYPE, token)
        # An operand that is skipped is known by its shape, which a float written in the code lacks.
        args = tuple(arg if hasattr(arg, "shape") else np.asarray(arg) for arg in args)
        depth += 1
        try:
            return interpret(jaxpr, *args, ctx=ctx, token=token)
        finally:
            depth -= 1

    def counted_write(dma: Any) -> None:
        if dma.state == interpreter.DmaState.READ:
            route = names[dma.src_memory_space], names[dma.dst_memory_space]
            dma_bytes[route] += dma.data_size
            num_dmas[route] += 1
        write(dma)

    interpreter._interpret_jaxpr, interpreter.DMA.execute_write = counted_interpret, counted_write
    try:
        yield
    finally:
        interpreter._interpret_jaxpr, interpreter.DMA.execute_write = interpret, write


_BODIES = {"while": "body_jaxpr", "scan": "jaxpr"}


def _loops(jaxpr: Any, bodies: Counter[int]) -> Iterator[Trips]:
    """The loops directly in a jaxpr, those in its branches and calls included."""
    for eqn in jaxpr.eqns:
        if name := _BODIES.get(eqn.primitive.name):
            body = eqn.params[name]
            yield Trips(bodies[id(body)], list(_loops(body, bodies)), list(_alternatives(body, bodies)))
        else:
            for inner in _inner(eqn):
                yield from _loops(inner, bodies)


def _alternatives(jaxpr: Any, bodies: Counter[int]) -> Iterator[float]:
    for eqn in jaxpr.eqns:
        for inner in _inner(eqn):
            within = list(_alternatives(inner, bodies))
            is_alternative = eqn.primitive.name == "cond" and not within and _multiplies(inner)
            yield from [bodies[id(inner)]] if is_alternative else within


def _multiplies(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == "dot_general" or any(map(_multiplies, _inner(eqn))) for eqn in jaxpr.eqns)


def _inner(eqn: Any) -> list[Any]:
    """The branches of a condition, in the order of their machine code, or a call's jaxpr; nothing of a loop."""
    if eqn.primitive.name in _BODIES:
        return []
    return [*reversed(eqn.params.get("branches", ())), *filter(None, [eqn.params.get("jaxpr")])]
