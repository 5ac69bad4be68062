"""What the device keeps from step to step, beside the caches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding


class DeviceState(NamedTuple):
    """Given to each step, to be donated, and given back by it. It begins as zeros.

    Its arrays have an element for each of the R rows of the running table, and a last one for padding rows.

    last_token_ids: int32 [R + 1], what was last sampled for each row. It feeds the rows whose newest token the host has
        not seen yet.
    """

    last_token_ids: jax.Array

    @staticmethod
    def structs(num_rows: int, sharding: Sharding) -> "DeviceState":
        """The shapes, for R = `num_rows`, in place of arrays."""
        shapes = jax.eval_shape(lambda: DeviceState(last_token_ids=jnp.zeros(num_rows + 1, jnp.int32)))
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)

    @staticmethod
    def allocate(num_rows: int, sharding: Sharding) -> "DeviceState":
        structs = DeviceState.structs(num_rows, sharding)
        return jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), structs)
