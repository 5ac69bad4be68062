import dataclasses
from pathlib import Path

import pytest

import jaxllm
from jaxllm import scheduler
from jaxllm.config import EngineConfig, TenantConfig, resolve
from jaxllm.errors import ConfigError


def resolved(platform="cpu", model_max_len=2048, **options):
    return resolve(EngineConfig(model="m", **options), platform=platform, model_max_len=model_max_len)


def test_the_options_are_these():
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    assert defaults.pop("model") is dataclasses.MISSING
    values = {"tensor_parallel_size": 1, "seed": 0, "enable_prefix_caching": True, "scheduling_policy": "priority"}
    values |= {"host_kv_gb": 0.0, "kv_return_by": "auto"}
    values |= {
        "max_wait_ms": 0.0,
        "min_batch": 1,
        "tenants": dataclasses.MISSING,
        "default_tenant": scheduler.TenantConfig(),
    }
    assert {name: default for name, default in defaults.items() if default is not None} == values
    assert set(defaults) == {
        "revision",
        "dtype",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "page_size",
        "num_pages",
        "memory_utilization",
        "tensor_parallel_size",
        "attention_implementation",
        "compilation_cache_dir",
        "enable_prefix_caching",
        "scheduling_policy",
        "max_queued_requests",
        "max_queued_tokens",
        "max_wait_ms",
        "min_batch",
        "tpot_target_ms",
        "ttft_target_ms",
        "host_kv_gb",
        "kv_return_by",
        "tenants",
        "default_tenant",
        "seed",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of bfloat16, float32, float16, or None for auto"),
        ({"dtype": float}, "dtype is <class 'float'>"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; it must be one of"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be an integer of at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be an integer of at least 1"),
        ({"max_num_seqs": 8.0}, "max_num_seqs is 8.0; it must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it must be an integer"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1; "),
        ({"page_size": "16"}, "page_size is '16'; it must be an integer"),
        ({"num_pages": 1}, "num_pages is 1; it must be an integer of at least 2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; "),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'; it must be one of priority, fcfs, fair"),
        ({"max_queued_requests": 0}, "max_queued_requests is 0; it must be an integer of at least 1"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1; it must be a number, 0 or more"),
        ({"max_wait_ms": None}, "max_wait_ms is None; it must be a number, 0 or more"),
        ({"tpot_target_ms": 0}, "tpot_target_ms is 0; it must be a number above 0"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"memory_utilization": 0}, "memory_utilization is 0; it must be above 0 and at most 1"),
        ({"memory_utilization": 1.01}, "memory_utilization is 1.01; "),
        ({"memory_utilization": float("nan")}, "memory_utilization is nan; "),
        ({"memory_utilization": "0.5"}, "memory_utilization is '0.5'; "),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "max_num_batched_tokens is 63 and max_num_seqs is 64: .* Raise the first or lower the second",
        ),
        ({"host_kv_gb": -1}, "host_kv_gb is -1; it must be a number, 0 or more"),
        ({"host_kv_gb": float("inf")}, "host_kv_gb is inf; it must be a number, 0 or more"),
        ({"host_kv_gb": "4"}, "host_kv_gb is '4'; it must be a number"),
        ({"kv_return_by": "mail"}, "kv_return_by is 'mail'; it must be one of auto, copy, recompute"),
        (
            {"host_kv_gb": 4, "enable_prefix_caching": False},
            "host_kv_gb is 4 and enable_prefix_caching is False: .* or leave host_kv_gb at 0",
        ),
        ({"tenants": [1]}, r"tenants is \[1\]; it must be a mapping of names to TenantConfigs"),
        ({"tenants": {1: TenantConfig()}}, "tenants is {1: .* it must be a mapping of names"),
        ({"tenants": {"a": {"weight": 2}}}, "the tenant 'a' is {'weight': 2}; it must be a TenantConfig"),
        ({"default_tenant": None}, "default_tenant is None; it must be a TenantConfig"),
        ({"min_batch": 4}, "min_batch is 4 and max_wait_ms is 0: no request waits for others"),
        ({"min_batch": 9, "max_wait_ms": 5, "max_num_seqs": 8}, "min_batch is 9 and max_num_seqs is 8"),
        (
            {"min_batch": 9, "max_wait_ms": 5, "max_num_batched_tokens": 8},
            "min_batch is 9 and max_num_batched_tokens is 8: so many never start at once",
        ),
        (
            {"tenants": {"a": TenantConfig(weight=2)}},
            "the weight of the tenant 'a' is 2, and scheduling_policy is 'priority', which knows none",
        ),
        ({"ttft_target_ms": 200}, "ttft_target_ms is 200 without tpot_target_ms"),
        ({"max_seqs": 3}, r"no option 'max_seqs'\. Did you mean max_num_seqs\?"),
    ],
)
def test_a_bad_option_is_refused_with_its_value_and_limit(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (
            "cpu",
            {
                "dtype": "bfloat16",
                "kv_cache_dtype": "bfloat16",
                "max_model_len": 8192,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 512,
                "page_size": 64,
                "memory_utilization": 0.05,
            },
        ),
        (
            "tpu",
            {
                "dtype": "bfloat16",
                "kv_cache_dtype": "bfloat16",
                "max_model_len": 131_072,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 2048,
                "page_size": 64,
                "memory_utilization": 0.9,
            },
        ),
    ],
)
def test_auto_becomes_what_the_docstring_says(platform, expected):
    config = resolved(platform, model_max_len=131_072)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.compilation_cache_dir == str(Path.home() / ".cache" / "jaxllm")
    assert None not in [getattr(config, field.name) for field in dataclasses.fields(config)]


def test_what_is_given_is_kept():
    given = {
        "dtype": "float16",
        "kv_cache_dtype": "bfloat16",
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 7,
        "page_size": 16,
        "num_pages": 9,
        "memory_utilization": 1,
        "tensor_parallel_size": 2,
        "attention_implementation": "reference",
        "compilation_cache_dir": "",
        "seed": 5,
    }
    config = resolved(**given)
    options = dataclasses.asdict(config.options) | dataclasses.asdict(config)
    assert {name: options[name] for name in given} == given
    assert config.max_pages_per_seq == 7


def test_defaults_fit_what_is_given():
    assert resolved(max_num_batched_tokens=8).max_num_seqs == 8
    assert resolved(max_num_seqs=1000).max_num_batched_tokens == 1000
    assert resolved(dtype="float32", platform="gpu").kv_cache_dtype == "float32"
    assert resolved(model_max_len=2048).max_model_len == 2048
    assert resolved(model_max_len=2048, max_model_len=2048).max_model_len == 2048
    with pytest.raises(ConfigError, match=r"max_model_len is 2,049; the model was made for 2,048 tokens\. Lower"):
        resolved(model_max_len=2048, max_model_len=2049)


def test_a_batch_that_is_waited_for_has_room():
    assert resolved(min_batch=40, max_wait_ms=5).max_num_seqs == 40
    assert resolved(min_batch=40, max_wait_ms=5, max_num_batched_tokens=41).max_num_seqs == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 0}, "weight is 0; it must be a number above 0"),
        ({"weight": "2"}, "weight is '2'; it must be a number above 0"),
        ({"max_queued": 2.5}, "max_queued is 2.5; it must be an integer of at least 1"),
        ({"max_runing": 1}, r"no option 'max_runing'\. Did you mean max_running\?"),
    ],
)
def test_a_bad_option_of_a_tenant_is_one_of_our_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        TenantConfig(**options)


def test_a_contradiction_is_found_before_the_model_is_looked_for():
    with pytest.raises(ConfigError, match="min_batch is 4"):
        jaxllm.LLM("no such model", min_batch=4)


def test_a_scheduler_follows_the_options_as_they_were_given():
    options = EngineConfig(
        model="m", scheduling_policy="fair", min_batch=3, max_wait_ms=1, tenants={"a": TenantConfig()}
    )
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "page_size": 4, "num_pages": 32}
    config = scheduler.SchedulerConfig.of(options, **sizes)
    for field in dataclasses.fields(scheduler.SchedulingOptions):
        assert getattr(config, field.name) == getattr(options, field.name)
