"""A checkpoint is read whatever stands before its tensors' names: transformers has written several things there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny_model

from jaxllm.errors import UnsupportedModelError
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model


def weights(folder):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    checkpoint = open_checkpoint(str(folder))
    model = Model.from_checkpoint(checkpoint, dtype=jnp.dtype("float32"), max_model_len=128, mesh=mesh)
    return model.load(checkpoint, progress=False)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file, metadata={"format": "pt"})


def set_tied(folder, tied):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"tie_word_embeddings": tied}
    file.write_text(json.dumps(config))


def renamed(name, prefix, others):
    for body in ("language_model.model.", "model."):
        if name.startswith(body):
            return prefix + name.removeprefix(body)
    return name if name == "lm_head.weight" else others + name


@pytest.mark.parametrize(
    ("model", "prefix", "others"),
    [
        ("gemma3_multimodal", "language_model.model.", ""),  # transformers 4.50, and what the hub has
        ("gemma3_multimodal", "model.language_model.", "model."),  # 4.52 and later
        ("gemma3", "", ""),  # the base model alone
        ("gemma3", "language_model.", ""),
        ("llama", "", ""),
        ("qwen2", "model.language_model.", ""),
    ],
)
def test_a_prefix_that_transformers_writes_changes_no_weight(tmp_path, model, prefix, others):
    folder = write_tiny_model(model, tmp_path)
    expected = weights(folder)
    edit(folder, lambda tensors: {renamed(name, prefix, others): tensor for name, tensor in tensors.items()})
    for array, other in zip(weights(folder), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(array), np.asarray(other))


def test_an_output_projection_that_is_the_embedding_is_passed_over(tmp_path):
    folder = write_tiny_model("gemma3", tmp_path)
    expected = weights(folder)
    edit(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    assert len(weights(folder)) == len(expected)


def test_an_output_projection_of_its_own_is_not_ignored(tmp_path):
    folder = write_tiny_model("gemma3", tmp_path)
    edit(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2})
    with pytest.raises(UnsupportedModelError, match=r"output projection \(lm_head.weight\) that is not its embedding"):
        weights(folder)
    set_tied(folder, False)
    weights(folder)
