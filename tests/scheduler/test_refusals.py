"""What can never be served is refused at the door, with the arithmetic."""

import numpy as np
import pytest

from jaxllm.scheduler import Request, RequestRefusedError, SamplingRow, SchedulerConfigError


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty; it must have at least one token"),
        (5, 0, "max_tokens is 0; it must be at least 1"),
        (9_000, 1, "the prompt has 9,000 tokens; max_model_len is 8,192"),
        (8_192, 1, "the prompt has 8,192 tokens; max_model_len is 8,192"),
        (1_000, 601, "make 1,601 tokens; they need 101 pages of 16 tokens, and the KV cache has 100"),
        (1_000, 10**9, "make 8,192 tokens; they need 512 pages of 16 tokens, and the KV cache has 100"),
    ],
)
def test_a_request_that_never_fits_is_refused(make_loop, num_prompt_tokens, max_tokens, message):
    loop = make_loop(max_model_len=8_192, page_size=16, num_pages=101)
    with pytest.raises(RequestRefusedError, match=f"request 'big'.*{message}"):
        loop.add(Request("big", [1] * num_prompt_tokens, max_tokens=max_tokens))
    assert not loop.scheduler.has_unfinished_requests


def test_the_largest_request_that_fits_runs_alone(make_loop, expect_alone):
    loop = make_loop(1, page_size=16, num_pages=9, max_model_len=128)
    largest = Request("largest", [1] * 100, max_tokens=28)
    loop.add(*(Request(f"r{index}", [2] * 30, max_tokens=90) for index in range(3)), largest)
    loop.run()
    assert largest.output_token_ids == expect_alone(largest, loop.config)


def test_a_request_id_in_use_is_refused_and_free_again_when_finished(make_loop):
    loop = make_loop()
    request = Request("a", [1], max_tokens=3)
    loop.add(request)
    with pytest.raises(RequestRefusedError, match=r"'a'.*has not finished"):
        loop.add(Request("a", [2], max_tokens=3))
    loop.run()
    with pytest.raises(RequestRefusedError, match="finished_length: make a new Request"):
        loop.add(request)
    loop.add(Request("a", [2], max_tokens=3))
    loop.run()


@pytest.mark.parametrize("token_ids", [[1, -1], [2**31], [2**70], [1.5], ["a"], [[1, 2]], np.array([[1]])])
@pytest.mark.parametrize("name", ["prompt_token_ids", "stop_token_ids"])
def test_token_ids_that_no_int32_array_holds_are_refused(name, token_ids):
    arguments = {"prompt_token_ids": [1], "stop_token_ids": ()} | {name: token_ids}
    with pytest.raises(RequestRefusedError, match=name):
        Request("a", max_tokens=1, **arguments)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_sampling_settings_out_of_range_are_refused(setting):
    with pytest.raises(RequestRefusedError, match=next(iter(setting))):
        SamplingRow(**setting)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be an integer of at least 1"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_pages": 1}, "num_pages is 1; it must be an integer of at least 2"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be an integer of at least 2"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "63 and max_num_seqs is 64"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(make_config, sizes, message):
    with pytest.raises(SchedulerConfigError, match=message):
        make_config(**sizes)
