"""The engine in the caller's own process: the core's loop, and text around it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig, ResolvedConfig
from jaxllm.engine.core import add_choices
from jaxllm.engine.core_output import CoreOutput
from jaxllm.engine.core_request import CoreRequest
from jaxllm.engine.runner import Runner
from jaxllm.engine.start import open_model, start_core
from jaxllm.engine.text.output_processor import OutputProcessor
from jaxllm.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxllm.request_options import DEFAULT_OPTIONS, RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class _Answer:
    """What one request gives, while it comes."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    on_text: Callable[[str], None] | None
    deltas: list[list[OutputDelta]]  # of each continuation
    num_unfinished: int
    unheard: list[str] = field(default_factory=list)

    def append(self, delta: OutputDelta) -> None:
        self.deltas[delta.index].append(delta)
        self.num_unfinished -= delta.finish_reason is not None
        if self.on_text is not None and delta.text:
            self.unheard.append(delta.text)

    def tell(self) -> None:
        """Gives the listener what it has not heard. One that has raised hears nothing more."""
        on_text, self.on_text, unheard, self.unheard = self.on_text, None, self.unheard, []
        for text in unheard:
            assert on_text is not None
            on_text(text)
        self.on_text = on_text

    def output(self) -> RequestOutput:
        last = [deltas[-1] for deltas in self.deltas]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[CompletionOutput.of(deltas) for deltas in self.deltas],
            finished=True,
            metrics=RequestMetrics.joint([delta.metrics for delta in last if delta.metrics is not None]),
        )


class Engine:
    """Serves one model. Not thread-safe: one thread adds requests and calls `step`."""

    def __init__(self, config: EngineConfig, *, progress: bool = False):
        """Opens the model, reads its weights and compiles the first program, side by side."""
        checkpoint = open_model(config)
        with ThreadPoolExecutor(1, thread_name_prefix="jaxllm-load") as loader:
            loading = loader.submit(checkpoint.tokenizer)
            self.core = start_core(config, checkpoint=checkpoint, progress=progress)
            self.tokenizer: PreTrainedTokenizerFast = loading.result()
        self.info = self.core.info.with_tokenizer(self.tokenizer)
        self._outputs: OutputProcessor[_Answer] = OutputProcessor(self.tokenizer)
        self._keys: dict[str, list[str]] = {}  # the core's, of each request's continuations
        self._finished: list[RequestOutput] = []  # that no call has returned yet

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def config(self) -> ResolvedConfig:
        return self.core.config

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def runner(self) -> Runner:
        return self.core.runner

    @property
    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        prompt: str | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """Queues a request; `step` returns its output when it has finished.

        Args:
          request_id: unique among the unfinished requests.
          prompt_token_ids: at least one, fewer than max_model_len, within the vocabulary.
          options: how it is to be served.
          prompt: the text of the prompt, to be returned with the output.
          on_text: called with each new piece of text, from within `step`. Not for several continuations.

        Raises InvalidRequestError, or OverloadedError if there is no room now, and leaves everything as it was.
        """
        assert on_text is None or params.n == 1
        now = time.monotonic()
        request = CoreRequest.of(
            params,
            options,
            info=self.info,
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            arrival_time=now,
            streams=on_text is not None,
        )
        self._keys[request_id] = keys = add_choices(self.core, request, params.seeds())
        token_ids = request.prompt_token_ids
        answer = _Answer(request_id, prompt, token_ids, on_text, [[] for _ in keys], num_unfinished=len(keys))
        self._outputs.add(keys, answer, prompt_token_ids=token_ids, params=params, arrival_time=now)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request in any state. Returns what it has so far; None if no unfinished one has this id."""
        for rest in [self.core.end_request(key, "abort") for key in self._keys.get(request_id, ())]:
            if rest is not None:
                self._take_in(rest)
        for output in self._finished:
            if output.request_id == request_id:
                self._finished.remove(output)
                return output
        return None

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request, after a `step` that raised. Returns what they have so far.

        Nothing that a step may have left half done is found in the prefix cache afterwards.
        """
        self._take_in(self.core.abort_all())
        return self._take_finished()

    def step(self) -> list[RequestOutput]:
        """Runs a step of the core. Returns what has finished."""
        self._take_in(self.core.step())
        return self._take_finished()

    def shutdown(self) -> None:
        """Stops background work."""
        self.core.shutdown()

    def _take_in(self, output: CoreOutput) -> None:
        """Hands out what the core tells. Listeners come last, so that nothing is lost if one raises."""
        processed = self._outputs.process(output)
        deltas = [*processed.first, *processed.others]
        for key in processed.stopped:
            self.core.end_request(str(key), "stop")
        for answer, delta in deltas:
            answer.append(delta)
            if not answer.num_unfinished:
                del self._keys[answer.request_id]
                self._finished.append(answer.output())
        for answer, _ in deltas:
            answer.tell()

    def _take_finished(self) -> list[RequestOutput]:
        finished, self._finished = self._finished, []
        return finished
