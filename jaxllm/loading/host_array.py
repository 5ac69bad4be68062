"""Host arrays that XLA can take over without a copy, and reading files into them."""

from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from jaxllm.errors import CorruptCheckpointError

# On CPU, `jax.device_put` adopts a numpy buffer that is aligned so and copies any other; numpy aligns to 16.
ALIGNMENT_BYTES = 64


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised C-ordered array whose data start at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    nbytes = prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def aligned(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """`array` itself if it is C-ordered, aligned and of this dtype; otherwise a converted copy."""
    if array.dtype == dtype and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    copy = aligned_empty(array.shape, dtype)
    copy[...] = array
    return copy


def read_array(path: Path, offset_bytes: int, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """The array stored at `offset_bytes` of a file, in C order and little-endian.

    Plain reads and no mmap: XLA on CPU would adopt the mapped pages themselves, and a file that is rewritten
    or cut later would change the weights or kill the process.
    """
    array = aligned_empty(shape, dtype)
    unread = memoryview(array.reshape(-1).view(np.uint8))
    with path.open("rb", buffering=0) as file:
        file.seek(offset_bytes)
        while unread:  # one read returns at most 2 GiB
            count = file.readinto(unread)
            if not count:
                raise CorruptCheckpointError(
                    f"{path} ended {len(unread):,} bytes too early: it was cut while it was read. Download it again."
                )
            unread = unread[count:]
    return array
