"""Decoded blocks equal those of the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest

from jaxllm.loading.gguf_quants import QUANTIZED_TYPES, WEIGHTS_PER_PIECE, dequantize

QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the gguf package only decodes the K formats


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_weights_decode_as_in_gguf(name):
    tensor_type = gguf.GGMLQuantizationType[name]
    weights = np.random.RandomState(0).standard_normal((33, 4096)).astype(np.float32)  # more than one piece
    assert weights.size > WEIGHTS_PER_PIECE

    rows = gguf.quants.quantize(weights, tensor_type)
    decoded = dequantize(rows.reshape(-1, gguf.GGML_QUANT_SIZES[tensor_type][1]), tensor_type)

    np.testing.assert_array_equal(decoded.reshape(weights.shape), gguf.quants.dequantize(rows, tensor_type))
    assert np.abs(decoded.reshape(weights.shape) - weights).max() < 0.5
    assert decoded.dtype == np.float32


@pytest.mark.parametrize("tensor_type", QUANTIZED_TYPES, ids=lambda tensor_type: tensor_type.name)
def test_any_bytes_decode_as_in_gguf(tensor_type):
    type_size = gguf.GGML_QUANT_SIZES[tensor_type][1]
    # Below 0x40 no pair of bytes is an infinite or NaN half-precision scale.
    blocks = np.random.RandomState(1).randint(0, 0x40, (600, type_size)).astype(np.uint8)

    expected = gguf.quants.dequantize(blocks, tensor_type)

    np.testing.assert_array_equal(dequantize(blocks, tensor_type), expected)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_high_bits_decode_as_in_gguf(name):
    tensor_type = gguf.GGMLQuantizationType[name]
    type_size = gguf.GGML_QUANT_SIZES[tensor_type][1]
    blocks = np.random.RandomState(2).randint(0, 256, (600, type_size)).astype(np.uint8)
    blocks[:, 1] = blocks[:, 3] = 0x3C  # scales near 1

    np.testing.assert_array_equal(dequantize(blocks, tensor_type), gguf.quants.dequantize(blocks, tensor_type))
