"""An engine that costs nothing: no model and no scheduler, a token for each request in each step.

It says the prompt again and again. `STEP_MS` in the environment is the time from the end of one step to that of the
next, whatever is done between, as with a device that is a step ahead of its host; with 0 the steps follow each other at
once.
"""

import os
import time
from typing import Literal

from jaxllm import EngineConfig, EngineInfo, EngineStats
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.scheduler import RequestStatus, SchedulerStats

STEP_MS = "JAXLLM_FREE_ENGINE_STEP_MS"
MAX_MODEL_LEN = 8192


class FreeEngine:
    """See `jaxllm.engine.core.Core`. All requests run at once."""

    def __init__(self, config: EngineConfig) -> None:
        self.info = EngineInfo(
            model=config.model,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=49_152,
            page_size=64,
            num_pages=2,
            max_num_seqs=1024,
            max_num_batched_tokens=1 << 20,
            dtype="float32",
            kv_cache_dtype="float32",
            platform="cpu",
            device="none",
            eos_token_ids=(),
            enable_prefix_caching=False,
        )
        self._step_s = float(os.environ.get(STEP_MS, "0")) / 1e3
        self._step_end = 0.0
        self._running: dict[str, list] = {}  # request, number of output tokens
        self._held: dict[str, list[int]] = {}  # of requests that do not stream, all tokens but the first
        self._new: list[str] = []
        self._num_steps = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def add_request(self, request: CoreRequest) -> None:
        self._running[request.request_id] = [request, 0]
        self._new.append(request.request_id)

    def end_request(self, request_id: str, reason: Literal["abort", "stop"]) -> CoreOutput | None:
        if self._running.pop(request_id, None) is None:
            return None
        self._held.pop(request_id, None)
        return CoreOutput(time=time.monotonic(), finished=[(request_id, reason, None)])

    def step(self) -> CoreOutput:
        start = time.monotonic()
        # Who came during the last step runs in the next one, and gets its token at the end of that.
        rows = list(self._running.items())
        new, self._new = [key for key in self._new if key in self._running], []
        if self._step_s:
            was_idle = self._step_end < start - self._step_s
            self._step_end = (start if was_idle else self._step_end) + self._step_s
            time.sleep(max(0.0, self._step_end - start))
        output = CoreOutput(time=time.monotonic(), started=[(key, start, 0) for key in new])
        for key, row in rows:
            request, number = row
            row[1] = number + 1
            prompt = request.prompt_token_ids
            token_ids = [prompt[number % len(prompt)]]
            is_last = number + 1 == request.max_tokens
            if not request.streams and number:
                token_ids = self._held.setdefault(key, []) + token_ids if is_last else token_ids
                if not is_last:
                    self._held.setdefault(key, []).extend(token_ids)
                    continue
            output.add_tokens(key, token_ids)
            if is_last:
                output.finished.append((key, "length", None))
                del self._running[key]
                self._held.pop(key, None)
        self._num_steps += 1
        return output

    def recover(self, error: Exception) -> CoreOutput:
        raise error

    def stats(self) -> EngineStats:
        scheduler = SchedulerStats(num_requests={RequestStatus.DECODING: len(self._running)})
        return EngineStats(time=time.monotonic(), num_steps=self._num_steps, scheduler=scheduler)

    def reset_prefix_cache(self, *, force: bool) -> bool:
        return True

    def profile(self, folder: str | None) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        """There is nothing to end."""
