"""What all tests need before JAX starts, and how they take signals."""

import os
import signal
from unittest import mock

import jax

# Each warpgroup of a simulated GPU takes a thread of XLA's pool, and keeps it while it waits for the others. With two
# cores there would be two threads for three of them.
with mock.patch.dict(os.environ, NPROC=str(max(4, os.cpu_count() or 1))):
    jax.devices()

# As at a terminal, also under nohup or in the background of a script: what such a parent ignores, its children ignore,
# and tests send these signals to programs that they start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
