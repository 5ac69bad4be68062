"""What every source of a model offers, whatever its files look like."""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Checkpoint(Protocol):
    """An opened model: headers are read, files are checked for completeness, no tensor is read yet.

    Tensors carry their Hugging Face names ("model.layers.0.self_attn.q_proj.weight") and layouts. `read` may
    be called from several threads at once.
    """

    source: str
    """Where the model came from, for messages."""

    config: dict[str, Any]
    """As in a Hugging Face `config.json`."""

    generation_config: dict[str, Any]
    """As in a Hugging Face `generation_config.json`; empty if the source states none."""

    nbytes: int
    """Bytes of all tensors as stored."""

    def tensor_names(self) -> set[str]: ...

    def tensor_shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray:
        """A fresh array, owned by the caller alone: of the stored dtype, or float32 if it is quantized."""
        ...

    def require_tokenizer(self) -> None:
        """Raises TokenizerNotFoundError if there is none, at once."""
        ...

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Raises TokenizerNotFoundError; UnsupportedModelError for a kind that this version does not know."""
        ...
