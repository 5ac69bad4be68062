"""A folder of safetensors reads as the safetensors library wrote it; a damaged one says what is wrong."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from jaxllm.errors import (
    CorruptCheckpointError,
    ModelNotFoundError,
    TokenizerNotFoundError,
    UnsupportedModelError,
)
from jaxllm.loading.safetensors import SafetensorsCheckpoint


def write_folder(folder, *files, config=None, index=False):
    """model.safetensors, or the parts of a model with or without an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    weight_map = {}
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8])
def test_tensors_come_back_bit_for_bit(tmp_path, dtype):
    random = np.random.RandomState(0)
    tensors = {f"t{i}": (random.standard_normal((i, 3)) * 9).astype(dtype) for i in (1, 5, 20)}
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path, tensors))
    assert checkpoint.tensor_names() == tensors.keys()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert checkpoint.tensor_shape(name) == read.shape == tensor.shape
        assert read.dtype == dtype
        assert read.tobytes() == tensor.tobytes()
        assert read.ctypes.data % 64 == 0  # XLA on CPU takes it over without a copy
        read[...] = 0  # it is ours: neither the file nor the next reader sees this
        assert checkpoint.read(name).tobytes() == tensor.tobytes()


@pytest.mark.parametrize("index", [True, False])
def test_parts_are_one_checkpoint(tmp_path, index):
    parts = [{"a": np.ones((2, 2), np.float32)}, {"b": np.zeros(3, np.float32)}]
    folder = write_folder(tmp_path, *parts, index=index)
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.tensor_names() == {"a", "b"}
    assert checkpoint.read("a")[1, 1] == 1


def test_index_leaves_a_second_copy_of_the_weights_unread(tmp_path):
    parts = [{"a": np.ones(2, np.float32)}, {"b": np.ones(2, np.float32)}]
    folder = write_folder(tmp_path, *parts, index=True)
    save_file({"a": np.zeros(2, np.float32)}, folder / "consolidated.safetensors")
    assert SafetensorsCheckpoint(folder).read("a")[0] == 1


def test_tensor_in_two_files_is_refused(tmp_path):
    parts = [{"a": np.ones(2, np.float32)}, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}]
    with pytest.raises(CorruptCheckpointError, match=r"tensor a is in model-00001.* again in model-00002"):
        SafetensorsCheckpoint(write_folder(tmp_path, *parts))


def test_part_that_is_missing_is_named(tmp_path):
    parts = [{"a": np.ones(2, np.float32)}, {"b": np.ones(2, np.float32)}]
    folder = write_folder(tmp_path, *parts, index=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1 of the 2 files .* missing: model-00002-of-00002"):
        SafetensorsCheckpoint(folder)


def test_truncated_file_tells_how_many_bytes_are_missing(tmp_path):
    path = write_folder(tmp_path, {"a": np.ones((64, 64), np.float32)}) / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, 100, 20, 8):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpointError, match=rf"{size:,} are present\. Download it again"):
            SafetensorsCheckpoint(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"describes {len(whole):,} bytes"):
        SafetensorsCheckpoint(tmp_path)


def test_file_that_is_cut_after_opening_is_an_error_of_ours(tmp_path):
    path = write_folder(tmp_path, {"a": np.ones((64, 64), np.float32)}) / "model.safetensors"
    checkpoint = SafetensorsCheckpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError, match="4 bytes too early"):
        checkpoint.read("a")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (b"not json at all!", "no safetensors header"),
        (b'{"a":{"dtype":"F32"}}', "no safetensors header"),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
            r"occupies 4 bytes; its shape \(2,\) .* 8",
        ),
    ],
)
def test_damaged_header_is_refused(tmp_path, entry, message):
    write_folder(tmp_path, {"a": np.ones(2, np.float32)})
    (tmp_path / "model.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry + bytes(8))
    with pytest.raises(CorruptCheckpointError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_unknown_dtype_is_refused_by_name(tmp_path):
    write_folder(tmp_path, {"a": np.ones(2, np.float32)})
    entry = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry + bytes(1))
    with pytest.raises(UnsupportedModelError, match=r"tensor a .* of type F4; known are F64, F32"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_quantized_safetensors_are_refused(tmp_path, nested):
    config = {"quantization_config": {"quant_method": "awq"}}
    config = {"text_config": config} if nested else config
    with pytest.raises(UnsupportedModelError, match=r"is quantized \(awq\)"):
        SafetensorsCheckpoint(write_folder(tmp_path, {"a": np.ones(2, np.float32)}, config=config))


def test_config_files_are_read_and_needed(tmp_path):
    write_folder(tmp_path, {"a": np.ones(2, np.float32)}, config={"model_type": "x", "text_config": {"n": 1}})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.config == {"model_type": "x", "text_config": {"n": 1}}
    assert checkpoint.generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert SafetensorsCheckpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is not valid JSON"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        SafetensorsCheckpoint(tmp_path)


def test_tokenizer_is_that_of_the_folder(tmp_path):
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path, {"a": np.ones(2, np.float32)}))
    with pytest.raises(TokenizerNotFoundError, match=r"holds no tokenizer: none of tokenizer\.json"):
        checkpoint.tokenizer()
    backend = Tokenizer(models.WordLevel({"hello": 0, "</s>": 1}, unk_token="</s>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = checkpoint.tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.encode("hello") == [0]
    assert tokenizer.eos_token_id == 1


def test_tokenizer_that_needs_code_from_the_repository_is_refused(tmp_path):
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path, {"a": np.ones(2, np.float32)}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('this code was executed')")
    with pytest.raises(TokenizerNotFoundError, match="cannot be read"):
        checkpoint.tokenizer()
