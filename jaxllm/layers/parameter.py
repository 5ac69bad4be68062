"""Parameters that know how they are split over the mesh."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

REPLICATED = PartitionSpec()


def parameter(
    shape: tuple[int, ...], dtype: jnp.dtype, partition: PartitionSpec = REPLICATED, *, num_copies: int = 1
) -> nnx.Param:
    """A parameter to be filled by the loader. `partition` names a mesh axis ("model") for each split axis.

    With `num_copies`, so many neighbouring devices hold the same part of the checkpoint's tensor, of which the last
    axis is shorter by this factor.

    Build models under `nnx.eval_shape`, so that nothing is allocated here.
    """
    return nnx.Param(jnp.zeros(shape, dtype), partition=partition, num_copies=num_copies)


def activation_dtype(weight_dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype between dots: the weights' own on accelerators; float32 on CPU, which has no fast bfloat16 else."""
    return jnp.dtype(jnp.float32) if platform == "cpu" else jnp.dtype(weight_dtype)
