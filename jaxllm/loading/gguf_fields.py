"""The metadata that a GGUF file has of its model, every field of which is used or refused."""

from typing import Any

import numpy as np

from jaxllm.errors import CorruptCheckpointError, UnsupportedModelError
from jaxllm.loading.gguf_file import GGUFFile

WITHOUT_EFFECT = frozenset(
    {"vocab_size", "attention.layer_norm_epsilon", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"}
    | {"mm.tokens_per_image"}
)
"""Fields that say the same as something that is read, or change no logits of these models."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
}
"""Values with which a field that is not known asks for nothing; of others: 0 and nothing."""
HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
"""Fields that must be the size of a head."""


class GGUFFields:
    """Those under the name of the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture: str = file.metadata["general.architecture"]
        self._prefix = f"{self.architecture}."
        self._read: set[str] = set()

    @property
    def embedding_shape(self) -> tuple[int, ...]:
        if "token_embd.weight" not in self.file.tensors:
            raise CorruptCheckpointError(f"{self.file.path} has no tensor token_embd.weight. Download it again.")
        return self.file.tensors["token_embd.weight"].shape

    def optional(self, name: str) -> Any:
        self._read.add(name)
        return self.file.metadata.get(self._prefix + name)

    def required(self, name: str) -> Any:
        if (value := self.optional(name)) is None:
            raise CorruptCheckpointError(f"{self.file.path} lacks the metadata {self._prefix}{name}. Convert it again.")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.required(name) if default is None else self.optional(name)
        if value is None:
            assert default is not None
            return default
        if not isinstance(value, int):
            raise UnsupportedModelError(
                f"{self._prefix}{name} in {self.file.path} is {value!r}; this version knows one number for all layers."
            )
        return value

    def names_under(self, prefix: str) -> set[str]:
        start = self._prefix + prefix
        return {key.removeprefix(start) for key in self.file.metadata if key.startswith(start)}

    def refuse_the_rest(self, head_dim: int) -> None:
        """Raises UnsupportedModelError for a field that nobody has read and that asks for something."""
        for name in sorted(self.names_under("") - self._read - WITHOUT_EFFECT):
            value = self.optional(name)
            if name in HEAD_SIZES:
                is_neutral = value == head_dim
            elif name in NEUTRAL:
                is_neutral = value in NEUTRAL[name]
            else:
                is_neutral = not (value if np.ndim(value) == 0 else any(value))
            if not is_neutral:
                raise UnsupportedModelError(
                    f"{self.file.path} has {self._prefix}{name} = {value}, which this version does not know."
                )
