"""A GGUF file as a checkpoint: Hugging Face names, layouts and configuration."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import TokenizerNotFoundError, UnsupportedModelError
from jaxllm.loading.gguf_architectures import ROPE_FACTORS
from jaxllm.loading.gguf_config import architecture_of, config_from_gguf, generation_config_from_gguf
from jaxllm.loading.gguf_file import GGUFFile
from jaxllm.loading.gguf_names import huggingface_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class GGUFCheckpoint:
    """See `Checkpoint`. Undoes what llama.cpp's conversion did to the weights, besides quantizing them."""

    def __init__(self, path: Path, source: str | None = None) -> None:
        self.source = source or str(path)
        self._file = GGUFFile(path)
        self.config = config_from_gguf(self._file)
        self.generation_config = generation_config_from_gguf(self._file)
        self.nbytes = sum(tensor.nbytes for tensor in self._file.tensors.values())
        self._architecture = architecture_of(self._file)

        self._gguf_names: dict[str, str] = {}
        for gguf_name in self._file.tensors:
            if gguf_name == ROPE_FACTORS and self._architecture.has_rope_factors:  # part of the configuration
                continue
            name = huggingface_name(gguf_name, self._architecture.layer_names)
            if name is None:
                architecture = self._file.metadata["general.architecture"]
                raise UnsupportedModelError(
                    f"{self.source} has a tensor {gguf_name}, which {architecture} models do not have."
                )
            self._gguf_names[name] = gguf_name

    def tensor_names(self) -> set[str]:
        return set(self._gguf_names)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def read(self, name: str) -> np.ndarray:
        return self._architecture.restored(name, self._file.read(self._gguf_names[name]), self.config)

    def require_tokenizer(self) -> None:
        if "tokenizer.ggml.model" not in self._file.metadata:
            raise TokenizerNotFoundError(f"{self.source} holds weights but no tokenizer.")

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        self.require_tokenizer()
        from jaxllm.loading.gguf_tokenizer import build_tokenizer  # transformers: a second of import

        return build_tokenizer(self._file.metadata, self.source)
