"""jaxllm: an inference and serving engine for large language models on JAX/XLA.

Public names load on first use, so that `import jaxllm.scheduler` imports neither JAX nor Flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.errors import JaxLLMError
    from jaxllm.llm import LLM
    from jaxllm.outputs import CompletionOutput, RequestOutput
    from jaxllm.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "JaxLLMError": "errors",
    "LLM": "llm",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "JaxLLMError", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(import_module(f"jaxllm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
