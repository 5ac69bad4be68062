"""A folder of `config.json` and `*.safetensors`, as the Hugging Face hub serves it.

Format (github.com/huggingface/safetensors): the length of the header in 8 little-endian bytes, the header as
JSON `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, the data. The header is parsed here because
the library hands out unaligned copies and does not tell how many bytes a cut file lacks.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jaxllm.errors import (
    CorruptCheckpointError,
    ModelNotFoundError,
    TokenizerNotFoundError,
    UnsupportedModelError,
)
from jaxllm.loading.host_array import read_array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class StoredTensor:
    path: Path
    offset_bytes: int  # from the start of the file
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsCheckpoint:
    """See `Checkpoint`. Opening reads the headers only."""

    def __init__(self, folder: Path, source: str | None = None) -> None:
        self.source = source or str(folder)
        self._folder = folder
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"{self.source} holds *.safetensors but no config.json, which names the model's kind."
            )
        self.config: dict[str, Any] = _read_json(folder / "config.json")
        generation_config = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = _read_json(generation_config) if generation_config.is_file() else {}
        _refuse_quantized(self.config, self.source)

        self._tensors: dict[str, StoredTensor] = {}
        for path in _weight_files(folder):
            tensors = read_header(path)
            if twice := sorted(self._tensors.keys() & tensors.keys()):
                raise CorruptCheckpointError(
                    f"tensor {twice[0]} is in {self._tensors[twice[0]].path.name} and again in {path.name} "
                    f"({len(twice)} tensors are double). Remove the file that does not belong here."
                )
            self._tensors |= tensors
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def tensor_names(self) -> set[str]:
        return set(self._tensors)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return read_array(tensor.path, tensor.offset_bytes, tensor.shape, tensor.dtype)

    def require_tokenizer(self) -> None:
        if not any((self._folder / name).is_file() for name in TOKENIZER_FILES):
            raise TokenizerNotFoundError(f"{self.source} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}.")

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        self.require_tokenizer()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes a second

        # The classes that AutoTokenizer chooses build some tokenizers anew, from the vocabulary and what they know of a
        # family. What the file says goes before that.
        is_whole = (self._folder / "tokenizer.json").is_file()
        kind = PreTrainedTokenizerFast if is_whole else AutoTokenizer
        try:
            tokenizer = kind.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises nothing more special
            raise TokenizerNotFoundError(f"the tokenizer of {self.source} cannot be read: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UnsupportedModelError(
                f"the tokenizer of {self.source} is a {type(tokenizer).__name__}; this version needs one "
                "that transformers runs by its tokenizers library."
            )
        return tokenizer


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `.safetensors` file. Raises CorruptCheckpointError if it is cut or damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        header = file.read(data_start - 8) if data_start <= size else b""
    if data_start > size:
        raise _truncated(path, expected=data_start, present=size)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        layout = {name: (e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} has no safetensors header. Download it again.") from error

    expected = data_start + max((end for *_, end in layout.values()), default=0)
    if size < expected:
        raise _truncated(path, expected, size)
    tensors = {}
    for name, (dtype, shape, begin, end) in layout.items():
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"tensor {name} in {path} is of type {dtype}; known are {', '.join(DTYPES)}.")
        tensor = StoredTensor(path, data_start + begin, shape, np.dtype(DTYPES[dtype]))
        if begin < 0 or end - begin != tensor.nbytes:
            raise CorruptCheckpointError(
                f"tensor {name} in {path} occupies {end - begin:,} bytes; its shape {shape} of {dtype} needs "
                f"{tensor.nbytes:,}. Download the file again."
            )
        tensors[name] = tensor
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The index decides; a lone `model.safetensors` comes next; then whatever else is there."""
    index = folder / INDEX_FILE
    if not index.is_file():
        whole = folder / "model.safetensors"
        return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(_read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{index} has no weight_map. Download it again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CorruptCheckpointError(
            f"{len(missing)} of the {len(names)} files that {index} lists are missing: "
            f"{', '.join(missing[:5])}. Download them again."
        )
    return [folder / name for name in names]


def _refuse_quantized(config: dict[str, Any], source: str) -> None:
    text_config = config.get("text_config") or {}
    if quantization := config.get("quantization_config") or text_config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{source} is quantized ({quantization.get('quant_method', 'method not named')}); this version "
            "reads safetensors in float32, float16 or bfloat16, and GGUF quantizations."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise CorruptCheckpointError(f"{path} is not valid JSON ({error}). Download it again.") from error


def _truncated(path: Path, expected: int, present: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path} is truncated: its header describes {expected:,} bytes, {present:,} are present. Download it again."
    )
