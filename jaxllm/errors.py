"""What can go wrong, as one tree.

JaxLLMError
├── InvalidRequestError (ValueError)    a request that cannot be served: empty or too long a prompt, a bad option
├── OverloadedError                     a request for which there is no room now: a full queue, a tenant over quota
├── EngineDeadError                     the engine's process has ended or does not answer; it may be on its way back
├── ConfigError (ValueError)            engine options that contradict each other, the model or the device
├── LoadingError                        a model that cannot be read
│   ├── ModelNotFoundError              no such folder, file, hub id or alias
│   ├── UnsupportedModelError           an architecture, feature or tensor type this version does not know
│   ├── CorruptCheckpointError          truncated or damaged file; a tensor missing, unexpected or of a wrong shape
│   └── TokenizerNotFoundError          the source holds weights but no tokenizer
└── OutOfMemoryError                    weights, programs and one sequence's pages exceed the device's memory

Each message names the value, the limit and the way out.
"""


class JaxLLMError(Exception):
    """Base of every error that jaxllm raises on purpose."""


class InvalidRequestError(JaxLLMError, ValueError):
    """A request that cannot be served as asked.

    param: the option that is to blame, as `SamplingParams` calls it; "prompt" for the prompt.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(JaxLLMError):
    """A request for which there is no room now. It may be sent again.

    retry_after_s: when to try; None where that depends on others.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(JaxLLMError):
    """The engine's process has ended, or is not there yet. While it is started again, requests may be sent anew."""


class ConfigError(JaxLLMError, ValueError):
    """Engine options that contradict each other, the model or the device."""


class LoadingError(JaxLLMError):
    """A model that cannot be read."""


class ModelNotFoundError(LoadingError):
    """No such folder, file, hub id or alias."""


class UnsupportedModelError(LoadingError):
    """An architecture, feature or tensor type that this version does not know."""


class CorruptCheckpointError(LoadingError):
    """A damaged file, or a tensor that is missing, unexpected or of a wrong shape."""


class TokenizerNotFoundError(LoadingError):
    """The source holds weights but no tokenizer."""


class OutOfMemoryError(JaxLLMError):
    """Weights, programs and the pages of one sequence exceed the device's memory."""
