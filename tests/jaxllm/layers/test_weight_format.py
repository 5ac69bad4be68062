"""That a format of weights has a room of its own: no layer and no model knows of it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxllm.layers.linear import Linear
from jaxllm.layers.parameter import parameter
from jaxllm.layers.weight_format import Dense, Source, WeightFormats
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model


@dataclass(frozen=True)
class Int8:
    """A scale for each column, made from the floats of a checkpoint."""

    def parameters(self, in_dim, out_dim, partition, *, num_copies):
        return {
            "values": parameter((in_dim, out_dim), jnp.dtype(jnp.int8), partition, num_copies=num_copies),
            "scales": parameter((out_dim,), jnp.dtype("float32"), PartitionSpec(partition[1]), num_copies=num_copies),
        }

    def sources(self, module):
        name = (f"{module}.weight",)
        return {
            "values": Source(name, lambda weight: self.integers(weight).T.astype(np.int8)),
            "scales": Source(name, self.scales),
        }

    def product(self, x_TX, weight, dtype):
        y_TY = jnp.matmul(x_TX, weight["values"].astype(x_TX.dtype), preferred_element_type=jnp.float32)
        return (y_TY * weight["scales"][None, :]).astype(dtype)

    @staticmethod
    def scales(weight):
        return np.abs(weight).max(1).astype(np.float32) / 127

    @classmethod
    def integers(cls, weight):
        return np.rint(weight.astype(np.float32) / cls.scales(weight)[:, None])

    @classmethod
    def rounded(cls, weight):
        """What the format makes of a tensor [out, in]."""
        return cls.integers(weight) * cls.scales(weight)[:, None]


class Rounded(Dense):
    """Floats that are those of `Int8`."""

    def sources(self, module):
        return {"values": Source((f"{module}.weight",), lambda weight: Int8.rounded(weight).T)}


def is_mlp(module):
    return ".mlp." in module


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_a_model_runs_with_layers_of_a_format_that_none_of_its_code_knows(tiny_model, name):
    """The MLPs in int8, as checkpoints leave other layers as they are: logits as of the same weights in float32."""
    tiny, rng = tiny_model(name), np.random.default_rng(0)
    token_ids = rng.integers(3, 200, 20).tolist()

    def logits(format_of):
        checkpoint = open_checkpoint(tiny.folder)
        model = Model.from_checkpoint(
            checkpoint, dtype=jnp.dtype("float32"), max_model_len=64, mesh=tiny.mesh, format_of=format_of
        )
        weights = model.load(checkpoint, progress=False)
        found = type(tiny._forward)(model, tiny.mesh, max_len=64)(weights, token_ids, [12, 8])
        return found, {str(weight.dtype) for weight in weights}

    dense = Dense(jnp.dtype("float32"))
    found, dtypes = logits(lambda module: Int8() if is_mlp(module) else dense)
    assert dtypes == {"float32", "int8"}
    expected, _ = logits(lambda module: Rounded(dense.dtype) if is_mlp(module) else dense)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    assert np.abs(found - tiny.prompt_logits(token_ids, [20])).max() > 1e-3 * np.abs(expected).max(), "nothing rounded"


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_multiplies_as_its_format_says(has_bias):
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((16, 32), np.float32), rng.standard_normal(16, np.float32)
    linear = Linear(32, 16, Int8(), PartitionSpec(None, "model"), bias=has_bias)
    for name, source in Int8().sources("m").items():
        linear.weight[name] = nnx.Param(jnp.asarray(source.assemble(weight)))
    if has_bias:
        linear.bias = nnx.Param(jnp.asarray(bias))
    x_TX = rng.standard_normal((5, 32), np.float32)
    y_TY = jax.jit(lambda x_TX: linear(x_TX))(x_TX)
    expected = x_TX.astype(np.float64) @ Int8.rounded(weight).T + (bias if has_bias else 0)
    np.testing.assert_allclose(y_TY, expected, rtol=0, atol=1e-4)
    assert y_TY.dtype == x_TX.dtype


def test_a_layer_has_the_format_of_its_path():
    asked = []
    formats = WeightFormats(jnp.dtype("float32"), lambda path: asked.append(path) or Int8())
    assert isinstance(formats.under("layers.3").under("mlp")["up"], Int8)
    assert asked == ["layers.3.mlp.up"]
    assert formats.under("layers.3").dtype == jnp.float32
