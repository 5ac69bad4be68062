"""Blocks of quantized weights to float32.

The layouts are those of ggml (ggml-common.h). The formats of 32 weights are decoded here, in place and in
pieces that stay in the cache, faster than by `gguf.quants`, which decodes the K formats of 256 weights.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from jaxllm.loading.host_array import aligned_empty

WEIGHTS_PER_PIECE = 2**17  # 512 KiB of float32


def dequantize(blocks: np.ndarray, tensor_type: GGMLQuantizationType) -> np.ndarray:
    """uint8 [number of blocks, bytes per block] to float32 [number of blocks, weights per block]."""
    block_size, _ = GGML_QUANT_SIZES[tensor_type]
    weights = aligned_empty((len(blocks), block_size), np.float32)
    decode = QUANTIZED_TYPES[tensor_type]
    blocks_per_piece = WEIGHTS_PER_PIECE // block_size
    for start in range(0, len(blocks), blocks_per_piece):
        piece = slice(start, start + blocks_per_piece)
        decode(blocks[piece], weights[piece])
    return weights


def _float16(blocks: np.ndarray, start: int) -> np.ndarray:
    return blocks[:, start : start + 2].view(np.float16).astype(np.float32)


def _unpack_nibbles(packed: np.ndarray, weights: np.ndarray) -> None:
    """16 bytes to 32 weights: first all low halves, then all high ones."""
    weights[:, :16] = packed & 0x0F
    weights[:, 16:] = packed >> 4


def _add_fifth_bits(packed: np.ndarray, weights: np.ndarray) -> None:
    weights += np.unpackbits(packed, axis=1, bitorder="little") << 4


def _decode_q4_0(blocks: np.ndarray, weights: np.ndarray) -> None:
    _unpack_nibbles(blocks[:, 2:], weights)
    weights -= 8
    weights *= _float16(blocks, 0)


def _decode_q4_1(blocks: np.ndarray, weights: np.ndarray) -> None:
    _unpack_nibbles(blocks[:, 4:], weights)
    weights *= _float16(blocks, 0)
    weights += _float16(blocks, 2)


def _decode_q5_0(blocks: np.ndarray, weights: np.ndarray) -> None:
    _unpack_nibbles(blocks[:, 6:], weights)
    _add_fifth_bits(blocks[:, 2:6], weights)
    weights -= 16
    weights *= _float16(blocks, 0)


def _decode_q5_1(blocks: np.ndarray, weights: np.ndarray) -> None:
    _unpack_nibbles(blocks[:, 8:], weights)
    _add_fifth_bits(blocks[:, 4:8], weights)
    weights *= _float16(blocks, 0)
    weights += _float16(blocks, 2)


def _decode_q8_0(blocks: np.ndarray, weights: np.ndarray) -> None:
    weights[...] = blocks[:, 2:].view(np.int8)
    weights *= _float16(blocks, 0)


def _decode_by_gguf(tensor_type: GGMLQuantizationType) -> Callable[[np.ndarray, np.ndarray], None]:
    def decode(blocks: np.ndarray, weights: np.ndarray) -> None:
        row = quants.dequantize(blocks.reshape(1, -1), tensor_type)  # it would loop over many rows
        weights[...] = row.reshape(weights.shape)

    return decode


QUANTIZED_TYPES: dict[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = {
    GGMLQuantizationType.Q4_0: _decode_q4_0,
    GGMLQuantizationType.Q4_1: _decode_q4_1,
    GGMLQuantizationType.Q5_0: _decode_q5_0,
    GGMLQuantizationType.Q5_1: _decode_q5_1,
    GGMLQuantizationType.Q8_0: _decode_q8_0,
    GGMLQuantizationType.Q2_K: _decode_by_gguf(GGMLQuantizationType.Q2_K),
    GGMLQuantizationType.Q3_K: _decode_by_gguf(GGMLQuantizationType.Q3_K),
    GGMLQuantizationType.Q4_K: _decode_by_gguf(GGMLQuantizationType.Q4_K),
    GGMLQuantizationType.Q5_K: _decode_by_gguf(GGMLQuantizationType.Q5_K),
    GGMLQuantizationType.Q6_K: _decode_by_gguf(GGMLQuantizationType.Q6_K),
}
"""How each type fills float32 weights from its blocks."""
