"""What runs in a core process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.engine_stats import EngineStats


class Core(Protocol):
    """What an engine must offer to run in a core process. `EngineCore` is one.

    All methods are called from one thread. It is made by a function of an `EngineConfig`, such as `start_core`, which
    returns when it can serve; what that raises is raised by `AsyncLLM.connect`.
    """

    info: EngineInfo
    """The tokenizer of the clients is read from `info.model` (a folder, or what else `EngineConfig.model` may be)."""

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` is to be called."""
        ...

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request. Raises InvalidRequestError, or OverloadedError, and leaves everything as it was. Anything
        else that it raises ends this request alone."""
        ...

    def end_request(self, request_id: str, reason: Literal["abort", "stop"]) -> CoreOutput | None:
        """Ends a request in any state. Returns its tokens that were not reported yet and its end, which no `step` will
        report again; None if no unfinished request has this id."""
        ...

    def step(self) -> CoreOutput:
        """Does one step, and reports what is new; it may be nothing. Must not block for long without work."""
        ...

    def recover(self, error: Exception) -> CoreOutput:
        """After a `step` that raised: ends the requests that were in it, with the reason "error", and reports that.
        Raises (the error itself will do) if the engine cannot go on; then the process ends, and is started again."""
        ...

    def stats(self) -> EngineStats:
        """At a cost that does not depend on the load; called every 100 ms."""
        ...

    def reset_prefix_cache(self, *, force: bool) -> bool: ...

    def profile(self, folder: str | None) -> None:
        """Starts a profiler trace there; None ends it. Raises InvalidRequestError."""
        ...

    def shutdown(self) -> None: ...


def add_choices(
    core: Core, request: CoreRequest, seeds: Sequence[int | None], *, key_of: Callable[[str], str] = str
) -> list[str]:
    """Queues a request once for each seed, which takes the place of its own: all of them, or none.

    key_of: what the core is to call the request of this name; as it is, if left out.

    Returns what the core calls them. Raises what `Core.add_request` does.
    """
    keys: list[str] = []
    try:
        for index, seed in enumerate(seeds):
            key = key_of(request.request_id if len(seeds) == 1 else f"{request.request_id}#{index}")
            core.add_request(replace(request, request_id=key, seed=seed))
            keys.append(key)
    except Exception:
        for key in keys:
            core.end_request(key, "abort")
        raise
    return keys
