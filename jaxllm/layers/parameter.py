"""Parameters that know how they are split over the mesh."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

REPLICATED = PartitionSpec()

# Activations keep the accelerator's native width; XLA on CPU has no fast bfloat16 but in its dots.
_ACTIVATION_DTYPE_ON_CPU = jnp.dtype(jnp.float32)


def parameter(shape: tuple[int, ...], dtype: jnp.dtype, partition: PartitionSpec = REPLICATED) -> nnx.Param:
    """A parameter to be filled by the loader. `partition` names a mesh axis ("model") for each split axis.

    Build models under `nnx.eval_shape`, so that nothing is allocated here.
    """
    return nnx.Param(jnp.zeros(shape, dtype), partition=partition)


def activation_dtype(weight_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype between dots: the weights' own on accelerators, float32 on CPU."""
    return _ACTIVATION_DTYPE_ON_CPU if jax.default_backend() == "cpu" else jnp.dtype(weight_dtype)
