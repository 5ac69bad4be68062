"""An engine whose model is a rule: no JAX, no weights, but the real scheduler with its queues, quotas and pages.

It repeats its prompt: "abc" goes on "abcabcabc…". Its model folder needs only the tokenizer of
`tiny_tokenizer.write_tokenizer`. A prompt may hold a cue, anywhere:

    !say:TEXT     says TEXT (up to "[assistant]" or the prompt's end) and then the end token
    !slow         each of its steps takes 50 ms longer
    !raise        the step that first has it raises
    !hang         the step that first has it never returns
    !die          the process ends in the step that first has it, without a word
    !refuse       add_request raises an error that is nobody's
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxllm import EngineConfig, EngineInfo, EngineStats, InvalidRequestError, OverloadedError, TokenLogprobs
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.scheduler import (
    Request,
    RequestRefusedError,
    RequestStatus,
    SampledTokens,
    Scheduler,
    SchedulerBusyError,
    SchedulerConfig,
    StepPlan,
)

EOS = 2
VOCAB_SIZE = 256
SLOW_S = 0.05
_REASONS = {
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORT: "abort",
    RequestStatus.FINISHED_TIMEOUT: "timeout",
    RequestStatus.FINISHED_ERROR: "error",
}


def ids_of(text: str) -> list[int]:
    """As the tokenizer encodes printable ASCII without spaces."""
    return [ord(character) - 30 for character in text]


SAY, ASSISTANT = ids_of("!say:"), ids_of("[assistant]")
SLOW, RAISE, HANG, DIE, REFUSE = (ids_of(cue) for cue in ("!slow", "!raise", "!hang", "!die", "!refuse"))


class StubEngine:
    """See `jaxllm.engine.core.Core`. A step takes `step_s` at least."""

    step_s = 0.002

    def __init__(self, config: EngineConfig) -> None:
        self._config = SchedulerConfig.of(
            config,
            max_num_seqs=config.max_num_seqs or 32,
            max_num_batched_tokens=config.max_num_batched_tokens or 2048,
            max_model_len=config.max_model_len or 2048,
            page_size=config.page_size or 16,
            num_pages=config.num_pages or 2049,
        )
        self.scheduler = Scheduler(self._config)
        self.info = EngineInfo(
            model=config.model,
            max_model_len=self._config.max_model_len,
            vocab_size=VOCAB_SIZE,
            page_size=self._config.page_size,
            num_pages=self._config.num_pages,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            dtype="float32",
            kv_cache_dtype="float32",
            platform="cpu",
            device="stub",
            eos_token_ids=(EOS,),
            enable_prefix_caching=self._config.enable_prefix_caching,
        )
        self._requests: dict[str, CoreRequest] = {}
        self._answers: dict[str, list[int]] = {}
        self._in_step: list[Request] = []
        self._num_steps = 0
        self._host_s = 0.0
        self._num_output_tokens = 0
        self._profile_folder: str | None = None

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    def add_request(self, request: CoreRequest) -> None:
        prompt = request.prompt_token_ids
        if _find(prompt, REFUSE) is not None:
            raise RuntimeError("a defect in add_request")
        try:
            self.scheduler.add_request(
                Request(
                    request.request_id,
                    prompt,
                    max_tokens=request.max_tokens or self._config.max_model_len,
                    min_tokens=request.min_tokens,
                    stop_token_ids=request.stop_token_ids,
                    options=request.options,
                    arrival_time=request.arrival_time,
                )
            )
        except SchedulerBusyError as error:
            raise OverloadedError(str(error), error.retry_after_s) from None
        except RequestRefusedError as error:
            raise InvalidRequestError(str(error), param=error.param) from None
        self._requests[request.request_id] = request
        self._answers[request.request_id] = _answer(prompt)

    def end_request(self, request_id: str, reason: Literal["abort", "stop"]) -> CoreOutput | None:
        status = RequestStatus.FINISHED_ABORT if reason == "abort" else RequestStatus.FINISHED_STOP
        if not self.scheduler.finish_request(request_id, status):
            return None
        self._forget(request_id)
        return CoreOutput(time=time.monotonic(), finished=[(request_id, reason, None)])

    def step(self) -> CoreOutput:
        start = time.monotonic()
        output = CoreOutput(time=start)
        for request in self.scheduler.expire():
            self._finish(output, request)
        plan = self.scheduler.schedule()
        self.scheduler.take_page_moves()
        if plan is None:
            return output
        self._in_step = requests = self.scheduler.table.requests_of(plan.rows)
        self._obey(requests, plan)
        for request in plan.started:
            num_cached = plan.num_computed_tokens[requests.index(request)].item()
            output.started.append((request.request_id, start, num_cached))
        time.sleep(self.step_s)
        sampled = np.array([self._next_token(request) for request in requests], np.int32)
        for request, token_ids in self.scheduler.update(plan, SampledTokens.one_each(sampled)).tokens_by_request():
            self._report(output, request, token_ids)
        self._in_step = []
        self._num_steps += 1
        output.time = time.monotonic()
        self._host_s += output.time - start
        return output

    def recover(self, error: Exception) -> CoreOutput:
        output = CoreOutput(time=time.monotonic())
        for request in self._in_step:
            self.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
            self._finish(output, request, str(error))
        self._in_step = []
        self.scheduler.reset_prefix_cache(force=True)
        return output

    def stats(self) -> EngineStats:
        return EngineStats(
            time=time.monotonic(),
            num_steps=self._num_steps,
            host_s=self._host_s,
            num_output_tokens=self._num_output_tokens,
            scheduler=self.scheduler.stats(),
        )

    def reset_prefix_cache(self, *, force: bool) -> bool:
        return self.scheduler.reset_prefix_cache(force=force)

    def profile(self, folder: str | None) -> None:
        if (folder is None) == (self._profile_folder is None):
            raise InvalidRequestError("no trace is being made" if folder is None else "a trace is being made already")
        self._profile_folder = folder

    def shutdown(self) -> None:
        """There is nothing to end."""

    def _obey(self, requests: Sequence[Request], plan: StepPlan) -> None:
        prompts = [self._requests[request.request_id].prompt_token_ids for request in requests]
        if any(_find(prompt, SLOW) is not None for prompt in prompts):
            time.sleep(SLOW_S)
        if any(_find(prompt, DIE) is not None for prompt in prompts):
            os._exit(1)
        while any(_find(prompt, HANG) is not None for prompt in prompts):
            time.sleep(1.0)
        if any(_find(prompt, RAISE) is not None for prompt in prompts):
            raise RuntimeError("a defect in step")

    def _next_token(self, request: Request) -> int:
        answer = self._answers[request.request_id]
        return answer[request.num_output_tokens % len(answer)]

    def _report(self, output: CoreOutput, request: Request, token_ids: list[int]) -> None:
        output.keys.append(request.request_id)
        output.num_new_tokens.append(len(token_ids))
        output.token_ids += token_ids
        self._num_output_tokens += len(token_ids)
        number = self._requests[request.request_id].num_logprobs
        if number is not None:
            output.logprobs[request.request_id] = [_logprobs(token_id, number) for token_id in token_ids]
        if request.status.is_finished:
            self._finish(output, request)

    def _finish(self, output: CoreOutput, request: Request, error: str | None = None) -> None:
        output.finished.append((request.request_id, _REASONS[request.status], error))
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id], self._answers[request_id]


class FreeStepEngine(StubEngine):
    """Its steps take no time but that of the scheduler."""

    step_s = 0.0


class DyingAtStartEngine(StubEngine):
    """Ends its process while it loads, as the system does when memory is short."""

    def __init__(self, config: EngineConfig) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class SlowStartEngine(StubEngine):
    """Takes a minute to load."""

    def __init__(self, config: EngineConfig) -> None:
        time.sleep(60.0)
        super().__init__(config)


class SlowRestartEngine(StubEngine):
    """Takes three seconds to load, but for the first time. The mark is in the model's folder."""

    def __init__(self, config: EngineConfig) -> None:
        mark = Path(config.model) / f"started-{os.getppid()}"
        if mark.exists():
            time.sleep(3.0)
        mark.touch()
        super().__init__(config)


def _answer(prompt: list[int]) -> list[int]:
    start = _find(prompt, SAY)
    if start is None:
        return prompt
    text = prompt[start + len(SAY) :]
    return [*text[: _find(text, ASSISTANT)], EOS]


def _find(token_ids: list[int], part: list[int]) -> int | None:
    """Where `part` begins first."""
    if part[0] not in token_ids:
        return None
    for start in range(len(token_ids) - len(part) + 1):
        if token_ids[start : start + len(part)] == part:
            return start
    return None


def _logprobs(token_id: int, number: int) -> TokenLogprobs:
    """The token itself is the likeliest; those after it follow."""
    top = [((token_id + rank) % VOCAB_SIZE, -0.5 - rank) for rank in range(number)]
    return TokenLogprobs(token_id=token_id, logprob=-0.5, top=top)
