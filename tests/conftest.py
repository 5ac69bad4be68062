"""What all tests need before JAX starts."""

import os
from unittest import mock

import jax

# Each warpgroup of a simulated GPU takes a thread of XLA's pool, and keeps it while it waits for the others. With two
# cores there would be two threads for three of them.
with mock.patch.dict(os.environ, NPROC=str(max(4, os.cpu_count() or 1))):
    jax.devices()
