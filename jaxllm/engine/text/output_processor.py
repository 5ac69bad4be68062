"""From the core's tokens to what a request gives back: text, stop strings, reasons, times."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from jaxllm.engine.core_output import CoreOutput, Key
from jaxllm.engine.text.detokenizer import Detokenizer
from jaxllm.engine.text.stop_strings import StopStrings
from jaxllm.outputs import FinishReason, OutputDelta, RequestMetrics, TokenLogprobs
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(slots=True)
class _Record[Sink]:
    """One unfinished continuation."""

    sink: Sink
    index: int
    params: SamplingParams
    metrics: RequestMetrics
    detokenizer: Detokenizer
    stop_strings: StopStrings | None
    is_read: bool = True

    def append(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, now: float, *, is_stopped: bool
    ) -> OutputDelta:
        """The delta of new tokens. One at which a stop string is complete is the last; those after it are dropped.

        is_stopped: the last token is a stop token; its text is part of the output only if the request wants it.
        """
        metrics = self.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if not self.is_read:
            metrics.num_output_tokens += len(token_ids)
            return OutputDelta(self.index, "", token_ids, logprobs)
        hides_last = is_stopped and not self.params.include_stop_str_in_output
        shown = token_ids[:-1] if hides_last else token_ids
        if self.stop_strings is not None:
            pieces: list[str] = []
            for number, token_id in enumerate(shown, 1):
                text = self.detokenizer.append((token_id,))
                if metrics.num_output_tokens + number > self.params.min_tokens:
                    text, stop_string = self.stop_strings.append(text)
                    if stop_string is not None:
                        delta = OutputDelta(self.index, "".join((*pieces, text)), token_ids[:number])
                        delta.logprobs = logprobs and logprobs[:number]
                        delta.stop_reason = stop_string
                        metrics.num_output_tokens += number
                        return self._close(delta, "stop", now)
                pieces.append(text)
            text = "".join(pieces)
        else:
            text = self.detokenizer.append(shown)
        metrics.num_output_tokens += len(token_ids)
        return OutputDelta(self.index, text, token_ids, logprobs)

    def finish(self, delta: OutputDelta, reason: FinishReason, error: str | None, now: float) -> OutputDelta:
        """Makes a delta the last one, with the text that was held back."""
        if self.is_read:
            delta.text += self._rest()
        if reason == "stop" and delta.token_ids and delta.token_ids[-1] in (self.params.stop_token_ids or ()):
            delta.stop_reason = delta.token_ids[-1]
        delta.error = error
        return self._close(delta, reason, now)

    def _rest(self) -> str:
        rest = self.detokenizer.finish()
        if self.stop_strings is None:
            return rest
        text, stop_string = self.stop_strings.append(rest)
        return text if stop_string is not None else text + self.stop_strings.finish()

    def _close(self, delta: OutputDelta, reason: FinishReason, now: float) -> OutputDelta:
        delta.finish_reason = reason
        self.metrics.finished_time = now
        delta.metrics = self.metrics
        return delta


@dataclass(slots=True)
class Processed[Sink]:
    """What a `CoreOutput` has brought to whom; of each continuation one delta at most. The deltas are made as they are
    iterated over, which is to be done, once, before the next output is processed: nobody waits for those behind.

    first: the first deltas of continuations, for which somebody waits most.
    others: those that end come before those that go on.
    stopped: those that have ended at a stop string, which the core is to be told; known when the others are.
    """

    first: Iterable[tuple[Sink, OutputDelta]]
    others: Iterable[tuple[Sink, OutputDelta]]
    stopped: list[Key]


@dataclass
class OutputProcessor[Sink]:
    """Knows the unfinished continuations by the core's key for each, and where what they give is to go: its `Sink`.

    Raises UnsupportedModelError for a tokenizer that a `Detokenizer` cannot run.
    """

    tokenizer: "PreTrainedTokenizerFast"
    _records: dict[Key, _Record[Sink]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Detokenizer(self.tokenizer, prompt_token_ids=(), skip_special_tokens=True)  # Now rather than at a request.

    def add(
        self,
        keys: Sequence[Key],
        sink: Sink,
        *,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival_time: float,
    ) -> None:
        """A request; `keys` are those of its continuations, in order."""
        for index, key in enumerate(keys):
            self._records[key] = _Record(
                sink,
                index,
                params,
                RequestMetrics(arrival_time=arrival_time),
                Detokenizer(
                    self.tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=params.skip_special_tokens
                ),
                StopStrings(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
                if params.stop
                else None,
            )

    @property
    def keys(self) -> list[Key]:
        """Of the continuations whose last delta has not been given."""
        return list(self._records)

    def process(self, output: CoreOutput) -> Processed[Sink]:
        """Takes in what the core tells. What it tells of a key that has ended here means nothing any more."""
        records, stopped = self._records, list[Key]()
        for key, when, num_cached_tokens in output.started:
            if (record := records.get(key)) is not None:
                record.metrics.first_scheduled_time = when
                record.metrics.num_cached_tokens = num_cached_tokens
        ends = {key: (reason, error) for key, reason, error in output.finished}
        first: dict[Key, list[int]] = {}
        ending: dict[Key, list[int]] = {key: [] for key in ends}
        going_on: dict[Key, list[int]] = {}
        for key, token_ids in output.tokens_by_key():
            if (record := records.get(key)) is not None:
                is_first = not record.metrics.num_output_tokens
                (first if is_first else ending if key in ends else going_on)[key] = token_ids

        def deltas_of(tokens: dict[Key, list[int]]) -> Iterator[tuple[Sink, OutputDelta]]:
            for key, token_ids in tokens.items():
                if (record := records.get(key)) is None:  # It has ended with its first delta, or was forgotten.
                    continue
                reason, error = ends.get(key, (None, None))
                if not token_ids:
                    assert reason is not None
                    yield self.finish(key, reason, error, now=output.time)
                    continue
                delta = record.append(token_ids, output.logprobs.get(key), output.time, is_stopped=reason == "stop")
                if delta.finish_reason is not None:
                    del records[key]
                    if reason is None:
                        stopped.append(key)
                elif reason is not None:
                    del records[key]
                    record.finish(delta, reason, error, output.time)
                yield record.sink, delta

        return Processed(deltas_of(first), chain(deltas_of(ending), deltas_of(going_on)), stopped)

    def finish(
        self, key: Key, reason: FinishReason, error: str | None = None, *, now: float
    ) -> tuple[Sink, OutputDelta]:
        """Ends a continuation with the tokens that it has."""
        record = self._records.pop(key)
        return record.sink, record.finish(OutputDelta(record.index, "", []), reason, error, now)

    def leave(self, key: Key, sink: Sink) -> None:
        """Nobody reads its text any more, and none is made. Its tokens and its end are still told, to this sink."""
        if (record := self._records.get(key)) is not None:
            record.is_read, record.sink = False, sink

    def forget(self, key: Key) -> None:
        """The core does not know it."""
        self._records.pop(key, None)
