"""What the core is asked to do: a request in token ids and numbers, without text."""

from dataclasses import dataclass

from jaxllm.engine.engine_info import EngineInfo
from jaxllm.errors import InvalidRequestError
from jaxllm.request_options import DEFAULT_OPTIONS, RequestOptions
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import SamplingRow

_GREEDY = SamplingRow()
_SETTINGS = SamplingRow.dtypes().keys() - {"seed", "wants_logprobs"}  # of SamplingParams too, with the same meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreRequest:
    """One prompt to continue once. Where the meaning is not said, it is that of `SamplingParams` and `Request`.

    request_id: unique among the core's unfinished requests.
    prompt_token_ids: within the vocabulary.
    max_tokens: None is until the context is full.
    stop_token_ids: all tokens that end it, the model's own end tokens too unless they are to be ignored.
    seed: uint32; None lets the core draw one.
    sampling: its seed and its wants_logprobs are left to the core.
    num_logprobs: None for no log-probabilities, else how many of the likeliest tokens come with each token's own.
    arrival_time: by ``time.monotonic``, which all processes of a machine share.
    streams: whether tokens are reported as they come; if not, the first is and the others at the end.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    sampling: SamplingRow = _GREEDY
    seed: int | None = None
    num_logprobs: int | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    arrival_time: float = 0.0
    streams: bool = True

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        options: RequestOptions,
        *,
        info: EngineInfo,
        request_id: str,
        prompt_token_ids: list[int],
        arrival_time: float,
        streams: bool,
    ) -> "CoreRequest":
        """What the core needs to know of `params`; the rest, which is about text, is not its business. As stop strings
        are looked for outside of it, a request that has some streams in any case. The seed is left open.

        Raises InvalidRequestError: a token id is not in the vocabulary.
        """
        if prompt_token_ids and not (min(prompt_token_ids) >= 0 and max(prompt_token_ids) < info.vocab_size):
            wrong = next(token_id for token_id in prompt_token_ids if not 0 <= token_id < info.vocab_size)
            raise InvalidRequestError(
                f"token id {f'{wrong:,}'[:40]} is not in the vocabulary; ids must be from 0 to {info.vocab_size - 1:,}",
                param="prompt",
            )
        return cls(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=(*(params.stop_token_ids or ()), *(() if params.ignore_eos else info.eos_token_ids)),
            sampling=SamplingRow(**{name: getattr(params, name) for name in _SETTINGS}),
            num_logprobs=params.logprobs,
            options=options,
            arrival_time=arrival_time,
            streams=streams or bool(params.stop),
        )
