"""From the scheduler's tokens to what a request gives back: text, reasons, times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.stop_strings import StopStrings
from jaxllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.step_plan import StepOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOP: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORT: "abort",
    RequestStatus.FINISHED_TIMEOUT: "timeout",
}


@dataclass
class _Record:
    """One unfinished request. `detokenizer` is None while nobody asks for its text before the end."""

    request: Request
    prompt: str | None
    params: SamplingParams
    metrics: RequestMetrics
    on_text: Callable[[str], None] | None
    detokenizer: Detokenizer | None
    stop_strings: StopStrings
    pieces: list[str] = field(default_factory=list)

    def show(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            if self.on_text is not None:
                self.on_text(text)


class OutputProcessor:
    """Watches unfinished requests. One that is neither streamed nor has stop strings costs nothing per token:
    its text is made at the end."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self._tokenizer = tokenizer
        self._records: dict[str, _Record] = {}
        self._watched: set[str] = set()  # those whose tokens are looked at as they come, or whose first has not come

    def add(
        self,
        request: Request,
        *,
        prompt: str | None,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
    ) -> None:
        """`on_text` is called with each new piece of the text."""
        needs_text = on_text is not None or params.stop
        self._watched.add(request.request_id)
        self._records[request.request_id] = _Record(
            request=request,
            prompt=prompt,
            params=params,
            metrics=RequestMetrics(arrival_time=request.arrival_time),
            on_text=on_text,
            detokenizer=self._detokenizer(request, params) if needs_text else None,
            stop_strings=StopStrings(params.stop or (), include_stop_str_in_output=params.include_stop_str_in_output),
        )

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that `process` and `finish` have not returned yet."""
        return list(self._records)

    def note_start(self, requests: Sequence[Request]) -> None:
        """A step that was just launched computes the first tokens of these requests (again, if preempted)."""
        for request in requests:
            metrics = self._records[request.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = time.monotonic()

    def process(self, output: StepOutput) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """Takes in a step's tokens. Returns the requests that the scheduler has finished, and those that end
        here because of a stop string, which the scheduler does not know yet. If a listener raises
        on the way, those records stay."""
        now = time.monotonic()
        stop_strings: dict[str, str] = {}
        for request, token_ids in output.tokens_by_request() if self._watched else ():
            record = self._records[request.request_id]
            if record.metrics.first_token_time is None:
                record.metrics.first_token_time = now
                if record.detokenizer is None:
                    self._watched.discard(request.request_id)
            if request.status is RequestStatus.FINISHED_STOP:
                token_ids = token_ids[:-1]
            if record.detokenizer is None or not token_ids:
                continue
            text, stop_string = record.stop_strings.append(record.detokenizer.append(token_ids))
            record.show(text)
            if stop_string is not None:
                stop_strings[request.request_id] = stop_string
        finished = [request.request_id for request in output.finished if request.request_id not in stop_strings]
        return (
            [self.finish(request_id, now) for request_id in finished],
            [self._finish(self._records[name], "stop", found, now) for name, found in stop_strings.items()],
        )

    def finish(self, request_id: str, now: float | None = None) -> RequestOutput:
        """The output of a request that the scheduler has finished."""
        record = self._records[request_id]
        request = record.request
        token_ids, stop_reason = request.output_token_ids, None
        ended_by_token = request.status is RequestStatus.FINISHED_STOP
        if ended_by_token and token_ids[-1] in (record.params.stop_token_ids or ()):
            stop_reason = token_ids[-1]
        if record.detokenizer is None:
            detokenizer = self._detokenizer(request, record.params)
            shown = token_ids[:-1] if ended_by_token else token_ids
            record.show(detokenizer.append(shown) + detokenizer.finish())
        else:
            text, stop_string = record.stop_strings.append(record.detokenizer.finish())
            record.show(text if stop_string is not None else text + record.stop_strings.finish())
        return self._finish(record, _REASONS[request.status], stop_reason, now or time.monotonic())

    def _finish(
        self, record: _Record, reason: FinishReason, stop_reason: int | str | None, now: float
    ) -> RequestOutput:
        request = record.request
        del self._records[request.request_id]
        self._watched.discard(request.request_id)
        token_ids = request.output_token_ids
        record.metrics.finished_time = now
        record.metrics.num_output_tokens = len(token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=record.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=0,
                    text="".join(record.pieces),
                    token_ids=token_ids,
                    finish_reason=reason,
                    stop_reason=stop_reason,
                )
            ],
            finished=True,
            metrics=record.metrics,
        )

    def _detokenizer(self, request: Request, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
