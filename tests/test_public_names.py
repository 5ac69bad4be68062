"""What users import is decided here, and costs nothing before it is used."""

import subprocess
import sys

import jaxllm

PUBLIC_NAMES = [
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "ControlTokens",
    "Conversation",
    "EngineConfig",
    "EngineDeadError",
    "EngineInfo",
    "EngineProcess",
    "EngineStats",
    "InvalidRequestError",
    "JaxLLMError",
    "LLM",
    "OutputDelta",
    "OutputStream",
    "OverloadedError",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "TenantConfig",
    "TokenLogprobs",
]


def test_the_public_names_are_these():
    assert sorted(jaxllm.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(jaxllm, name).__name__ == name
    assert set(PUBLIC_NAMES) <= set(dir(jaxllm))
    names = {}
    exec("from jaxllm import *", names)
    assert set(PUBLIC_NAMES) <= set(names)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(jaxllm, "Llm")


def test_importing_the_package_imports_nothing_heavy():
    program = "import sys, jaxllm; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "jaxllm" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "transformers", "tokenizers", "numpy", "huggingface_hub", "gguf"}


def test_only_the_engine_in_process_needs_jax():
    """A client of an engine process, such as an HTTP worker, has no use for it."""
    names = ", ".join(name for name in PUBLIC_NAMES if name != "LLM")
    program = f"import sys; from jaxllm import {names}\nprint('jax' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_what_is_not_installed_is_named_with_the_extra_that_has_it():
    program = "import sys; sys.modules['msgspec'] = None; import jaxllm; jaxllm.SamplingParams; jaxllm.AsyncLLM"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1] == "ImportError: AsyncLLM needs msgspec: pip install 'jaxllm[serve]'"
