"""Weights arrive whole, in the right dtype and place, without a second copy in memory."""

import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.errors import CorruptCheckpointError
from jaxllm.loading.host_array import aligned, aligned_empty
from jaxllm.loading.weights import WeightSpec, load_weights


class FakeCheckpoint:
    """Tensors in memory. Counts how often each is read."""

    source = "fake"
    generation_config = {}  # noqa: RUF012

    def __init__(self, tensors, config=None):
        self.tensors, self.config = tensors, config or {}
        self.reads = dict.fromkeys(tensors, 0)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def tensor_names(self):
        return set(self.tensors)

    def tensor_shape(self, name):
        return self.tensors[name].shape

    def read(self, name):
        self.reads[name] += 1
        return self.tensors[name].copy()

    def tokenizer(self):
        raise NotImplementedError


def load(checkpoint, specs, **options):
    return load_weights(checkpoint, specs, progress=False, **options)


def struct(*shape, dtype=np.float32):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def identity(name, array, dtype=np.float32):
    return {name: WeightSpec(struct(*array.shape, dtype=dtype), (name,), lambda tensor: tensor)}


def draw(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def test_weights_are_assembled_and_converted_once():
    tensors = {"q": draw(8, 6), "k": draw(4, 6), "norm": draw(6)}
    checkpoint = FakeCheckpoint(tensors)
    specs = {
        "qk": WeightSpec(struct(6, 12, dtype=ml_dtypes.bfloat16), ("q", "k"), lambda q, k: np.concatenate([q, k]).T),
        "norm": WeightSpec(struct(6), ("norm",), lambda norm: norm + 1),
    }
    weights = load(checkpoint, specs)
    assert weights["qk"].dtype == ml_dtypes.bfloat16
    assert weights["norm"].dtype == np.float32
    expected = np.concatenate([tensors["q"], tensors["k"]]).T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(weights["qk"]), expected)
    np.testing.assert_array_equal(np.asarray(weights["norm"]), tensors["norm"] + 1)
    assert set(checkpoint.reads.values()) == {1}


def test_cpu_adopts_the_host_array_instead_of_copying_it():
    source = aligned_empty((64, 64), np.float32)
    source[...] = draw(64, 64)
    checkpoint = FakeCheckpoint({"a": source})
    handed_out = []
    checkpoint.read = lambda name: handed_out.append(aligned(source.copy(), np.float32)) or handed_out[-1]
    array = load(checkpoint, identity("a", source))["a"]
    if jax.devices()[0].platform == "cpu":
        assert array.unsafe_buffer_pointer() == handed_out[0].ctypes.data


def test_aligned_copies_only_what_it_must():
    array = aligned_empty((4, 6), np.float32)
    array[...] = draw(4, 6)
    assert aligned(array, np.float32) is array
    for other in (array.T, array[:, 1:], array.astype(np.float16)):
        copy = aligned(other, np.float32)
        np.testing.assert_array_equal(copy, other)
        assert not np.shares_memory(copy, array)
        assert copy.ctypes.data % 64 == 0
        assert copy.flags.c_contiguous


def test_missing_tensors_are_named_with_the_parameter_that_needs_them():
    specs = {f"p{i}": WeightSpec(struct(2), (f"t{i}",), lambda t: t) for i in range(8)}
    with pytest.raises(CorruptCheckpointError) as caught:
        load(FakeCheckpoint({"t0": draw(2)}), specs)
    message = str(caught.value)
    assert "fake lacks 7 tensors" in message
    assert "t1 (for p1), t2 (for p2)" in message
    assert "t5" in message
    assert "t6" not in message
    assert "and 2 more" in message


def test_unexpected_tensors_are_named():
    a = draw(2)
    with pytest.raises(CorruptCheckpointError, match=r"fake has 2 tensors .* call for: adapter\.0, adapter\.1"):
        load(FakeCheckpoint({"a": a, "adapter.1": a, "adapter.0": a}), identity("a", a))


def test_tensors_that_follow_from_others_may_stay_unread():
    a = draw(2)
    harmless = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "rope_freqs.weight",
        "lm_head.weight",
        "vision.x",
    ]
    checkpoint = FakeCheckpoint({name: a for name in ["a", *harmless]}, {"tie_word_embeddings": True})
    load(checkpoint, identity("a", a), ignored_prefixes=("vision.",))
    assert checkpoint.reads["vision.x"] == 0


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {"text_config": {}, "tie_word_embeddings": False}])
def test_output_projection_of_an_untied_model_must_be_read(config):
    a = draw(2)
    with pytest.raises(CorruptCheckpointError, match=r"lm_head\.weight"):
        load(FakeCheckpoint({"a": a, "lm_head.weight": a}, config), identity("a", a))


def test_wrong_shapes_are_told_both():
    checkpoint = FakeCheckpoint({"a": draw(4, 6)})
    for assemble in (lambda a: a, lambda a: a.reshape(5, 5)):
        spec = WeightSpec(struct(5, 5), ("a",), assemble)
        with pytest.raises(CorruptCheckpointError, match=r"parameter w has shape \(5, 5\).*a \(4, 6\)"):
            load(checkpoint, {"w": spec})


def test_progress_bar_counts_bytes_on_stderr(capsys):
    a = draw(1000, 250)
    load_weights(FakeCheckpoint({"a": a}), identity("a", a), progress=True)
    captured = capsys.readouterr()
    assert "1.00M/1.00M" in captured.err
    assert captured.out == ""


MEMORY_SCRIPT = """
import re
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxllm.loading.sources import open_checkpoint
from jaxllm.loading.weights import WeightSpec, load_weights


def status_mib(field):  # VmHWM and not getrusage: that one inherits the maximum of the parent process
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def struct(shape):
    return jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16, sharding=sharding)


sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
jax.block_until_ready(jax.device_put(np.zeros(8, np.float32), sharding))
checkpoint = open_checkpoint(sys.argv[1])
shapes = {name: checkpoint.tensor_shape(name) for name in checkpoint.tensor_names()}
specs = {
    name: WeightSpec(struct(shape[::-1]), (name,), lambda tensor: tensor.T)
    if name.startswith("transposed")
    else WeightSpec(struct(shape), (name,), lambda tensor: tensor)
    for name, shape in shapes.items()
}
baseline = status_mib("VmRSS")
weights = load_weights(checkpoint, specs, progress=False)
total = sum(array.nbytes for array in weights.values()) / 2**20
num_buffers = len({array.unsafe_buffer_pointer() for array in weights.values()})
print(total, status_mib("VmHWM") - baseline, num_buffers)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_little_more_memory_than_the_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shape = (1024, 2560)  # 5 MiB
    tensors = {
        f"{kind}.{i}": np.full(shape, i, ml_dtypes.bfloat16) for i in range(20) for kind in ("plain", "transposed")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    output = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], check=True, capture_output=True, text=True
    )
    weights_mib, peak_mib, num_buffers = map(float, output.stdout.split())
    assert weights_mib == 200
    assert num_buffers == 40
    assert weights_mib <= peak_mib <= 1.25 * weights_mib


SHARDING_SCRIPT = """
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.loading.safetensors import SafetensorsCheckpoint
from jaxllm.loading.weights import WeightSpec, load_weights

mesh = jax.make_mesh((1, 4), ("data", "model"))
names = ("rows", "columns", "replicated")
partitions = {"rows": ("model", None), "columns": (None, "model"), "replicated": ()}
shardings = {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in partitions.items()}
specs = {
    name: WeightSpec(
        jax.ShapeDtypeStruct((8, 16), ml_dtypes.bfloat16, sharding=shardings[name]), (name,), lambda tensor: tensor
    )
    for name in names
}
checkpoint = SafetensorsCheckpoint(Path(sys.argv[1]))
weights = load_weights(checkpoint, specs, progress=False)
whole = np.arange(128).reshape(8, 16).astype(ml_dtypes.bfloat16)
shard_shapes = {"rows": (2, 16), "columns": (8, 4), "replicated": (8, 16)}
for name, array in weights.items():
    assert array.sharding == shardings[name]
    assert len(array.addressable_shards) == 4
    for shard in array.addressable_shards:
        assert shard.data.shape == shard_shapes[name]
        assert shard.data.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
"""


def test_each_device_gets_its_own_shards(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    tensor = np.arange(128, dtype=np.float32).reshape(8, 16)
    save_file(dict.fromkeys(("rows", "columns", "replicated"), tensor), tmp_path / "model.safetensors")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    subprocess.run([sys.executable, "-c", SHARDING_SCRIPT, str(tmp_path)], check=True)
