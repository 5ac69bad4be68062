"""jaxllm: an inference and serving engine for large language models on JAX/XLA.

Public names load on first use, so that `import jaxllm.scheduler` imports neither JAX nor Flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.config import EngineConfig, TenantConfig
    from jaxllm.control_tokens import ControlTokens
    from jaxllm.conversation import Conversation
    from jaxllm.engine.engine_info import EngineInfo
    from jaxllm.engine.engine_stats import EngineStats
    from jaxllm.engine.process.owner import EngineProcess
    from jaxllm.engine.text.output_stream import OutputStream
    from jaxllm.errors import ConfigError, EngineDeadError, InvalidRequestError, JaxLLMError, OverloadedError
    from jaxllm.llm import LLM
    from jaxllm.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput, TokenLogprobs
    from jaxllm.request_options import RequestOptions
    from jaxllm.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "ControlTokens": "control_tokens",
    "Conversation": "conversation",
    "EngineConfig": "config",
    "EngineDeadError": "errors",
    "EngineInfo": "engine.engine_info",
    "EngineProcess": "engine.process.owner",
    "EngineStats": "engine.engine_stats",
    "InvalidRequestError": "errors",
    "JaxLLMError": "errors",
    "LLM": "llm",
    "OutputDelta": "outputs",
    "OutputStream": "engine.text.output_stream",
    "OverloadedError": "errors",
    "RequestMetrics": "outputs",
    "RequestOptions": "request_options",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "TenantConfig": "config",
    "TokenLogprobs": "outputs",
}

__all__ = [
    "LLM",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    try:
        return getattr(import_module(f"jaxllm.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name == "msgspec":
            raise ImportError(f"{name} needs {error.name}: pip install 'jaxllm[serve]'") from error
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
