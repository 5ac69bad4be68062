import dataclasses

import pytest

from jaxllm.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput, TokenLogprobs


def names(cls):
    return [field.name for field in dataclasses.fields(cls)]


def test_the_fields_have_vllm_names():
    assert names(CompletionOutput) == [
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "logprobs",
        "error",  # ours: vLLM says why in its log
    ]
    assert names(RequestOutput) == [
        "request_id",
        "prompt",
        "prompt_token_ids",
        "outputs",
        "finished",
        "metrics",
    ]


def test_latencies_follow_from_the_times():
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=12.0,
        finished_time=15.0,
        num_output_tokens=7,
    )
    assert metrics.ttft_s == 2.0
    assert metrics.tpot_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "metrics",
    [
        RequestMetrics(arrival_time=1.0),
        RequestMetrics(arrival_time=1.0, first_token_time=2.0, num_output_tokens=3),
        RequestMetrics(arrival_time=1.0, first_token_time=2.0, finished_time=2.0, num_output_tokens=1),
        RequestMetrics(arrival_time=1.0, finished_time=2.0),
    ],
)
def test_a_latency_that_is_not_known_yet_is_none(metrics):
    assert metrics.tpot_s is None
    assert (metrics.ttft_s is None) == (metrics.first_token_time is None)


def test_repr_shows_the_text_and_spares_the_prompt_tokens():
    output = RequestOutput(
        request_id="7",
        prompt="Hello",
        prompt_token_ids=list(range(1000)),
        outputs=[CompletionOutput(index=0, text=" world", token_ids=[995])],
        finished=False,
    )
    assert repr(output) == (
        "RequestOutput(request_id='7', prompt='Hello', outputs=[CompletionOutput(index=0, text=' world', "
        "token_ids=[995], finish_reason=None, stop_reason=None, logprobs=None, error=None)], finished=False, "
        "metrics=None)"
    )


@pytest.mark.parametrize("wants_logprobs", [True, False])
def test_joined_deltas_are_the_same_wherever_some_were_joined_before(wants_logprobs):
    def delta(text, *token_ids, **end):
        logprobs = [TokenLogprobs(token_id, -1.0, []) for token_id in token_ids]
        return OutputDelta(1, text, [*token_ids], logprobs if token_ids and wants_logprobs else None, **end)

    metrics = RequestMetrics(arrival_time=1.0)
    deltas = [
        delta("a", 5),
        delta("", 6, 7),
        delta("bc"),
        delta("", finish_reason="stop", stop_reason=7, metrics=metrics),
    ]
    whole = OutputDelta.joined(deltas)
    assert whole == delta("abc", 5, 6, 7, finish_reason="stop", stop_reason=7, metrics=metrics)
    for cut in range(1, 4):
        assert OutputDelta.joined([OutputDelta.joined(deltas[:cut]), OutputDelta.joined(deltas[cut:])]) == whole
    assert CompletionOutput.of(deltas) == CompletionOutput(1, "abc", [5, 6, 7], "stop", 7, whole.logprobs)
