"""The container format GGUF: metadata and tensors of one file.

Format: github.com/ggml-org/ggml, docs/gguf.md. `gguf.GGUFReader` reads the same, but wraps every string of
the vocabulary in several numpy arrays, which takes seconds at each start; this parser takes a tenth of one.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.errors import CorruptCheckpointError, UnsupportedModelError
from jaxllm.loading.gguf_quants import QUANTIZED_TYPES, dequantize
from jaxllm.loading.host_array import read_array

STRING, ARRAY = 8, 9
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
FLOAT_TYPES = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class GGUFTensor:
    shape: tuple[int, ...]  # slowest axis first, as in numpy; the file has it reversed
    type: GGMLQuantizationType
    offset_bytes: int  # from the start of the file

    @property
    def nbytes(self) -> int:
        block_size, type_size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block_size * type_size


class GGUFFile:
    """`metadata` by key (scalars, str, list[str], 1-D arrays) and `tensors` by their names in the file."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptCheckpointError, or UnsupportedModelError (version, type of a tensor, split file)."""
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CorruptCheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                try:
                    self._parse(_Cursor(buffer))
                except (struct.error, ValueError, ArithmeticError) as error:
                    raise CorruptCheckpointError(
                        f"{path} is truncated or damaged: its header does not fit the {size:,} bytes "
                        "that are present. Download it again."
                    ) from error
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{path} is one of {self.metadata['split.count']} parts; merge them by `llama-gguf-split --merge`."
            )
        expected = max((tensor.offset_bytes + tensor.nbytes for tensor in self.tensors.values()), default=0)
        if size < expected:
            raise CorruptCheckpointError(
                f"{path} is truncated: its header describes {expected:,} bytes, {size:,} are present. "
                "Download it again."
            )

    def read(self, name: str) -> np.ndarray:
        """A fresh array; float32 if the tensor is quantized, the stored dtype otherwise."""
        tensor = self.tensors[name]
        if tensor.type in FLOAT_TYPES:
            return read_array(self.path, tensor.offset_bytes, tensor.shape, FLOAT_TYPES[tensor.type])
        type_size = GGML_QUANT_SIZES[tensor.type][1]
        blocks = read_array(self.path, tensor.offset_bytes, (tensor.nbytes // type_size, type_size), np.uint8)
        return dequantize(blocks, tensor.type).reshape(tensor.shape)

    def _parse(self, cursor: "_Cursor") -> None:
        cursor.position = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF of version {version} (or big-endian); this release reads 2 and 3."
            )
        num_tensors, num_entries = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))

        infos = [self._parse_tensor(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(shape, tensor_type, data_start + offset) for name, shape, tensor_type, offset in infos
        }

    def _parse_tensor(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        num_axes = cursor.scalar("<I")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_axes))[::-1]
        type_id, offset = cursor.scalar("<I"), cursor.scalar("<Q")
        known = {tensor_type.value: tensor_type for tensor_type in (*FLOAT_TYPES, *QUANTIZED_TYPES)}
        if type_id not in known:
            names = {tensor_type.value: tensor_type.name for tensor_type in GGMLQuantizationType}
            raise UnsupportedModelError(
                f"tensor {name} in {self.path} is of type {names.get(type_id, type_id)}; this version reads "
                f"{', '.join(tensor_type.name for tensor_type in known.values())}."
            )
        if prod(shape) % GGML_QUANT_SIZES[known[type_id]][0]:
            raise ValueError(f"tensor {name} does not consist of whole blocks")
        return name, shape, known[type_id], offset


class _Cursor:
    """Walks over the header. Reading past the end raises struct.error or ValueError."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """The hot loop: a file has hundreds of thousands of them."""
        buffer, position, strings = self.buffer, self.position, []
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            position = start + read_length(buffer, position)[0]
            strings.append(str(buffer[start:position], "utf-8"))
        if position > len(buffer):
            raise ValueError("a string ends behind the end of the file")
        self.position = position
        return strings

    def value(self, value_type: int) -> Any:
        if value_type == STRING:
            return self.string()
        if value_type == ARRAY:
            item_type, count = self.scalar("<I"), self.scalar("<Q")
            if item_type == STRING:
                return self.strings(count)
            dtype = np.dtype(self._layout(item_type))
            array = np.frombuffer(self.buffer, dtype, count, self.position).copy()
            self.position += array.nbytes
            return array
        return self.scalar(self._layout(value_type))

    def _layout(self, value_type: int) -> str:
        if value_type not in SCALARS:
            raise ValueError(f"no value has type {value_type}")
        return SCALARS[value_type]
