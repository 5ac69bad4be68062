"""A checkpoint's model: its shapes before the weights are read, and how to read them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxllm.errors import ConfigError, UnsupportedModelError
from jaxllm.layers.parameter import activation_dtype
from jaxllm.layers.weight_format import Dense, WeightFormat, WeightFormats
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.weights import WeightSpec, load_weights
from jaxllm.models.family import LanguageModel, ModelConfig
from jaxllm.models.registry import find_family
from jaxllm.models.tensor_names import EMBEDDING, HEAD, OTHER_PARTS, stored_name
from jaxllm.models.weight_table import Projection, parameter_sources

_CHOOSE = (
    "choose a tensor_parallel_size that divides the model's query heads, feed-forward width and vocabulary, and that "
    "divides its KV heads or is a multiple of them"
)


@dataclass(frozen=True)
class Model:
    """Everything about a model but its weights, so that programs can be compiled while those are read."""

    config: ModelConfig
    _specs: dict[str, WeightSpec]
    _graphdef: nnx.GraphDef
    _treedef: jax.tree_util.PyTreeDef

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: jnp.dtype,
        max_model_len: int,
        mesh: Mesh,
        format_of: Callable[[str], WeightFormat] | None = None,
    ) -> "Model":
        """Reads the checkpoint's config only.

        format_of: gives the format of a linear layer by its name in the checkpoint, such as
            "model.layers.0.mlp.up_proj"; None: dense, in `dtype`.

        Raises:
          UnsupportedModelError: the architecture, or a feature of it, is not known.
          ConfigError: the family overflows in this dtype, or heads or widths do not divide over the axis "model".
        """
        family = find_family(checkpoint.config)
        if dtype.name in family.refused_dtypes:
            raise ConfigError(
                f"dtype is {dtype.name}, in which models of the type {checkpoint.config['model_type']} overflow: "
                "choose bfloat16 or float32"
            )
        config = family.parse_config(family.hf_config(checkpoint.config), max_model_len)
        num_devices = mesh.shape["model"]
        if config.num_heads % num_devices:
            raise _does_not_divide(f"the number of query heads, {config.num_heads},", mesh)
        try:
            config = replace(config, cache_specs=tuple(spec.split(num_devices) for spec in config.cache_specs))
        except ValueError as error:
            raise ConfigError(f"{error}: {_CHOOSE}") from error
        between_dots = activation_dtype(dtype, mesh.devices.flat[0].platform)
        table = family.weight_table(config)
        modules = {path: entry.module for path, entry in table.items() if isinstance(entry, Projection)}
        formats = {path: format_of(name) if format_of else Dense(dtype) for path, name in modules.items()}
        model_formats = WeightFormats(dtype, formats.__getitem__)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: family.model(config, model_formats, between_dots)))
        sources, specs = parameter_sources(table, formats), {}
        for path, parameter in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            source = sources.pop(name)
            assemble = _copied(source.assemble, parameter.get_metadata()["num_copies"], num_devices)
            specs[name] = WeightSpec(_struct(name, parameter, mesh), source.names, assemble)
        assert not sources, f"the weight table names parameters that the model has not: {sorted(sources)}"
        return cls(config, specs, graphdef, jax.tree.structure(state))

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of each weight, in the order of the flat leaves that programs take."""
        return [spec.struct for spec in self._specs.values()]

    def load(self, checkpoint: Checkpoint, *, progress: bool) -> list[Array]:
        """The weights on their devices, in the order of `structs`.

        Raises:
          CorruptCheckpointError: a tensor is missing, unexpected or of a wrong shape.
          UnsupportedModelError: an output projection that is said to be the embedding is not.
        """
        stored = stored_name(checkpoint.tensor_names())
        specs = {
            name: replace(spec, sources=tuple(stored(source) for source in spec.sources))
            for name, spec in self._specs.items()
        }
        if not any(HEAD in spec.sources for spec in self._specs.values()):
            _check_tied(checkpoint, stored(EMBEDDING), stored(HEAD))
        weights = load_weights(checkpoint, specs, progress=progress, ignored_prefixes=OTHER_PARTS)
        return [weights[name] for name in self._specs]

    def bind(self, weights: list[Array]) -> LanguageModel:
        """The Flax module around these weights; to be called while a step program is traced."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, weights))

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on each device."""
        return sum(prod(struct.sharding.shard_shape(struct.shape)) * struct.dtype.itemsize for struct in self.structs)


def _struct(name: str, parameter: nnx.Variable, mesh: Mesh) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, parameter.get_metadata()["partition"])
    shape = tuple(parameter.shape)
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise _does_not_divide(f"{name} of shape {shape}", mesh) from error
    return jax.ShapeDtypeStruct(shape, parameter.dtype, sharding=sharding)


def _does_not_divide(what: str, mesh: Mesh) -> ConfigError:
    return ConfigError(f"{what} does not divide over {mesh.shape['model']} devices: {_CHOOSE}")


def _copied(assemble: Callable[..., np.ndarray], num_copies: int, num_devices: int) -> Callable[..., np.ndarray]:
    """`assemble`, with each part of the last axis `num_copies` times, so that there is one for each device."""
    if num_copies == 1:
        return assemble

    def assemble_copies(*tensors: np.ndarray) -> np.ndarray:
        whole = assemble(*tensors)
        parts = whole.reshape(*whole.shape[:-1], num_devices // num_copies, -1)
        return parts.repeat(num_copies, axis=-2).reshape(*whole.shape[:-1], -1)

    return assemble_copies


def _check_tied(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    """The output projection is not read. If the checkpoint has one all the same, it is a copy of the embedding."""
    if {embedding, head} <= checkpoint.tensor_names() and not np.array_equal(
        checkpoint.read(embedding), checkpoint.read(head)
    ):
        raise UnsupportedModelError(
            f"{checkpoint.source} has an output projection ({head}) that is not its embedding, and its config's "
            "tie_word_embeddings is true, stated or by default. Set it to false in config.json to use the tensor, or "
            "remove the tensor."
        )


def model_max_len(config_json: dict[str, Any]) -> int:
    """The most tokens that the model was made for, from its config.json. Raises UnsupportedModelError."""
    family = find_family(config_json)
    return family.max_len(family.hf_config(config_json))
