"""What XLA is told: by platform, and never against the user."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.engine.compiler_options import compiler_options
from jaxllm.scheduler.buckets import Bucket

DECODES, CHUNKS = Bucket.decodes(32), Bucket.mixed(512, 32)


def mesh(platform: str, num_devices: int = 1) -> SimpleNamespace:
    devices = np.array([[SimpleNamespace(platform=platform)] * num_devices])
    return SimpleNamespace(devices=devices, size=num_devices)


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_each_platform_has_its_own():
    assert compiler_options(DECODES, mesh("cpu")) == {"xla_backend_optimization_level": 2}
    assert set(compiler_options(CHUNKS, mesh("cpu"))) == {
        "xla_backend_optimization_level",
        "xla_cpu_prefer_vector_width",
    }
    assert compiler_options(DECODES, mesh("tpu")) == {}


@pytest.mark.parametrize("bucket", [DECODES, CHUNKS])
def test_one_gpu_gets_graphs_with_loops_and_nothing_that_does_not_fit_into_them(bucket):
    options = compiler_options(bucket, mesh("gpu"))
    assert {"CONDITIONAL", "WHILE", "CUSTOM_CALL"} <= set(options["xla_gpu_enable_command_buffer"].split(","))
    assert options["xla_gpu_enable_cub_radix_sort"] is options["xla_gpu_enable_dynamic_slice_fusion"] is False
    assert set(options) - set(compiler_options(bucket, mesh("gpu", 8))) == {
        "xla_gpu_enable_command_buffer",
        "xla_gpu_enable_cub_radix_sort",
    }


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_cpu_prefer_vector_width=256 --xla_other=1")
    assert set(compiler_options(DECODES, mesh("gpu"))) == {
        "xla_gpu_enable_cub_radix_sort",
        "xla_gpu_enable_dynamic_slice_fusion",
        "xla_disable_hlo_passes",
    }
    assert set(compiler_options(CHUNKS, mesh("cpu"))) == {"xla_backend_optimization_level"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer_va_remapping=true")
    assert "xla_gpu_enable_command_buffer" in compiler_options(DECODES, mesh("gpu"))
