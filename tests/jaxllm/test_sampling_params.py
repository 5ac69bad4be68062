import copy
import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import SamplingParams


def test_the_options_are_these_with_vllm_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert defaults == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "n": 1,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
    }
    assert list(inspect.signature(SamplingParams).parameters) == list(defaults)


def test_an_unknown_option_is_refused_with_the_closest_and_the_known_ones():
    with pytest.raises(InvalidRequestError, match=r"'temprature'.*mean temperature\?.*temperature, top_p, top_k"):
        SamplingParams(temprature=0.5)
    with pytest.raises(InvalidRequestError, match="'logit_bias'") as refusal:
        SamplingParams(top_k=1, logit_bias={})
    assert "mean" not in str(refusal.value)
    with pytest.raises(InvalidRequestError, match="'top_q'"):
        dataclasses.replace(SamplingParams(), top_q=1)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [
            -0.1,
            math.nan,
            math.inf,
            -math.inf,
            1e39,
            10**400,
            "1",
            None,
            True,
            np.float32("nan"),
        ],
        "top_p": [0, 0.0, -0.1, 1.01, math.nan, "1", None, True, np.float32(0), np.float16(1.5)],
        "top_k": [-2, 1.0, 2.5, 2**31, "1", None, True, np.float32(3), np.int64(-2), np.True_],
        "min_p": [-0.1, 1.1, math.nan, "0", None, False],
        "seed": [2**64, -(2**63) - 1, 0.5, "7", True],
        "n": [0, -1, 129, 1.0, "2", None, True],
        "max_tokens": [0, -1, 1.0, "16", True, math.nan],
        "min_tokens": [-1, 17, 1.0, "1", None, True],
        "stop": ["", [""], ["a", ""], 5, ["a", 5], [None], b"a", {"a"}, ("a", [])],
        "stop_token_ids": [5, "5", [-1], [1, -1], [1.0], ["1"], [True], [2**31], [None], {5}],
        "ignore_eos": [0, 1, "yes", None],
        "include_stop_str_in_output": [1],
        "skip_special_tokens": [None],
        "logprobs": [-1, 21, 1.0, "1", True],
    }.items(),
)
def test_a_bad_value_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(InvalidRequestError, match=rf"{name}.* is .*; it must be "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [0, 0.7, 2, 100.0, 3.4e38],
        "top_p": [1e-12, 0.5, 1, 1.0],
        "top_k": [0, 1, 2**31 - 1],
        "min_p": [0, 0.05, 1],
        "seed": [0, -2, -(2**63), 2**64 - 1, None],
        "n": [1, 128],
        "max_tokens": [1, 10**12, None],
        "min_tokens": [0, 16],
        "logprobs": [0, 20, None],
        "ignore_eos": [True, False],
    }.items(),
)
def test_a_value_at_its_limit_is_kept(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float16(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=[np.int32(7)],
        ignore_eos=np.True_,
    )
    assert params == SamplingParams(
        temperature=0.5, top_p=0.5, top_k=3, seed=2**64 - 1, stop_token_ids=[7], ignore_eos=True
    )
    for name in ("temperature", "top_p", "top_k", "seed", "ignore_eos"):
        assert type(getattr(params, name)) in (float, int, bool)
    assert type(params.stop_token_ids[0]) is int


def test_values_that_mean_the_same_become_equal():
    assert SamplingParams(temperature=9e-6).temperature == 0.0
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(stop="END").stop == SamplingParams(stop=["END"]).stop == ("END",)
    assert SamplingParams(stop=[]).stop == SamplingParams().stop == ()
    assert SamplingParams().stop_token_ids == ()


def test_later_changes_of_the_callers_lists_do_not_reach_the_request():
    stop, stop_token_ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append("")
    stop_token_ids.append(-1)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = -1


def test_copies_are_equal():
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params) == params
    assert hash(copy.copy(params)) == hash(params)


def test_seed_bits_are_the_seed_and_differ_for_other_seeds():
    small = [0, 1, 2, 2**31, 2**32 - 1]
    assert [SamplingParams(seed=seed).seed_uint32() for seed in small] == small
    seeds = [*small, -2, -3, -(2**31), 2**32 + 1, 2**33, 2**63 - 1, 2**64 - 1]
    bits = {SamplingParams(seed=seed).seed_uint32() for seed in seeds}
    assert len(bits) == len(seeds)
    assert all(0 <= value < 2**32 for value in bits)


def test_each_continuation_has_a_seed_of_its_own():
    params = SamplingParams(n=128, seed=2**32 - 1)
    assert params.seeds() == SamplingParams(n=128, seed=2**32 - 1).seeds()
    assert params.seeds()[0] == SamplingParams(seed=2**32 - 1).seed_uint32()
    assert len(set(params.seeds())) == 128
    assert all(0 <= seed < 2**32 for seed in params.seeds())
    assert SamplingParams(n=3).seeds() == [None] * 3


def test_min_tokens_may_not_exceed_max_tokens():
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 5; it must be .*max_tokens\], which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


def test_without_a_seed_each_call_draws_fresh_bits():
    params = SamplingParams()
    assert len({params.seed_uint32() for _ in range(4)}) > 1
