"""Times calls on an accelerator, so that neither its caches nor the launches make the figure.

A program makes many calls, one after the other, each of which needs what the one before has given; calls find their
inputs in different places of memory in turn. Programs follow each other without a wait in between, and the clock stops
when the last is done. A call that is long against its launch is a program by itself.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from statistics import median
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxllm.engine.compiler_options import Options, compiler_options
from jaxllm.scheduler.buckets import Bucket

SAMPLES = 7
SAMPLE_S = 0.05  # Of one sample, at least: a wait at its end of 20 µs is nothing then.
LONG_CALL_S = 1e-3  # Takes longer than the host needs to launch the next.
CALLS_PER_PROGRAM = 256
LATENCY_SAMPLES, LATENCY_S = 20, 2.0  # Fewer where they take so long together.


class Attend(Protocol):
    """Hashable, as it is a static argument: equal ones share their compiled programs."""

    def __call__(self, q: Array, state: Any, common: Any, place: Any) -> tuple[Array, Any]:
        """One call: the output, of q's shape and dtype, and the state after it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What is called, and with what: arrays are arguments, so that no compiler can compute with their values.

    Attributes:
      q: of the first call. Each other one gets the output of the one before as its queries: a dependency that costs no
        operation.
      state: arrays that calls update in place; donated.
      common: arrays that all calls read, such as the lengths: as in the layers of a model, what a call computes of them
        need be computed once for all calls of a program.
      places: what a call reads, one for each place.
    """

    attend: Attend
    q: Array
    state: Any
    common: Any
    places: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a call: median and best of all samples. latency_s: median, from a launch alone to its result."""

    median_s: float
    best_s: float
    latency_s: float
    calls_per_program: int

    def figures(self) -> dict[str, float]:
        return asdict(self)


def time_calls(calls: Calls, num_calls: int, *, samples: int = SAMPLES) -> Times:
    """Times `num_calls` calls, or a single one where that is long, as often as needed."""
    launcher = Launcher(calls)
    latencies_s = []
    for i in range(1 + LATENCY_SAMPLES):
        start = time.perf_counter()
        jax.block_until_ready(launcher.launch_one(i))
        latencies_s.append(time.perf_counter() - start)
        if i and sum(latencies_s[1:]) > LATENCY_S:
            break
    latency_s = median(latencies_s[1:])  # The first one compiled.
    if latency_s > LONG_CALL_S:
        calls_per_program, launch = 1, launcher.launch_one
    else:
        rounds = ceil(CALLS_PER_PROGRAM / num_calls)
        calls_per_program, launch = rounds * num_calls, partial(launcher.launch_rounds, rounds, num_calls)
    seconds = [s / calls_per_program for s in time_launches(launch, samples=samples)]
    return Times(
        median_s=median(seconds), best_s=min(seconds), latency_s=latency_s, calls_per_program=calls_per_program
    )


def time_launches(launch: Callable[[int], Any], *, samples: int = SAMPLES) -> list[float]:
    """Seconds of a launch, for each sample of many in a row. `launch(i)` returns arrays without waiting for them."""
    jax.block_until_ready(launch(0))
    start = time.perf_counter()
    jax.block_until_ready(launch(1))
    num_launches = ceil(SAMPLE_S / (time.perf_counter() - start))
    seconds = []
    for _ in range(samples):
        start = time.perf_counter()
        for i in range(num_launches):
            results = launch(i)
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - start) / num_launches)
    return seconds


class Launcher:
    """Launches programs of calls, and keeps the state that they hand on."""

    def __init__(self, calls: Calls):
        self._calls = calls
        self._state = calls.state
        self._program = program(jax.devices()[0])

    def launch_one(self, i: int) -> Array:
        """A program of one call, in the i-th place."""
        return self._launch(1, [self._calls.places[i % len(self._calls.places)]])

    def launch_rounds(self, num_rounds: int, num_calls: int, i: int) -> Array:
        """A program of so many rounds of so many calls."""
        del i  # Each of them goes through all places.
        return self._launch(num_rounds, [self._calls.places[j % len(self._calls.places)] for j in range(num_calls)])

    def _launch(self, num_rounds: int, places: Sequence[Any]) -> Array:
        calls = self._calls
        out, self._state = self._program(calls.attend, num_rounds, calls.q, self._state, calls.common, places)
        return out


@functools.cache
def program(device: jax.Device) -> Any:
    """The jitted `_rounds`, compiled for the device as the engine compiles its steps."""
    return jax.jit(_rounds, static_argnums=(0, 1), donate_argnums=3, compiler_options=engine_options(device))


def engine_options(device: jax.Device) -> Options:
    """What the engine tells XLA about a step on this device.

    On a GPU that is to put loops and conditions into CUDA graphs, without which the host waits in each turn of a loop.
    """
    mesh = Mesh(np.array([[device]]), ("data", "model"))
    return compiler_options(Bucket.decodes(64), mesh)


def _rounds(
    attend: Attend, num_rounds: int, q: Array, state: Any, common: Any, places: Sequence[Any]
) -> tuple[Array, Any]:
    def one_round(_: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        for place in places:
            carry = attend(*carry, common, place)
        return carry

    return one_round(0, (q, state)) if num_rounds == 1 else lax.fori_loop(0, num_rounds, one_round, (q, state))
