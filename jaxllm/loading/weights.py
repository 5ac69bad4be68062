"""Tensors of a checkpoint into the sharded arrays of a model."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from tqdm import tqdm

from jaxllm.errors import CorruptCheckpointError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.host_array import aligned

NUM_READERS = 2
"""Threads: while one waits for the device, the other reads. Each holds the tensors of one parameter, which
bounds the memory that is needed beside the weights."""

HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")  # follow from the configuration


@dataclass(frozen=True)
class WeightSpec:
    """Where one parameter of a model comes from.

    struct: its shape, dtype and sharding. sources: names of tensors in the checkpoint. `assemble(*sources)` lays
    these out in our shape, in any dtype; it may return a view of them.
    """

    struct: jax.ShapeDtypeStruct
    sources: tuple[str, ...]
    assemble: Callable[..., np.ndarray]


def load_weights(
    checkpoint: Checkpoint,
    specs: Mapping[str, WeightSpec],
    *,
    progress: bool,
    ignored_prefixes: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Every parameter of `specs`, in its dtype and placed by its sharding.

    Each tensor is read once and converted once. Of several devices each gets its own shards only. The host
    needs room for NUM_READERS parameters beside the weights. `ignored_prefixes` are those of tensors that the
    model leaves unread on purpose, such as a vision tower. `progress` shows a bar on stderr.

    Raises CorruptCheckpointError, naming the tensors that are missing, unexpected or of a wrong shape.
    """
    _check_names(checkpoint, specs, ignored_prefixes)

    def load(name: str) -> jax.Array:
        struct = specs[name].struct
        host_array = aligned(_assemble(checkpoint, name, specs[name]), struct.dtype)
        # On CPU the array adopts the memory of host_array, which nobody else holds.
        array = jax.make_array_from_callback(struct.shape, struct.sharding, host_array.__getitem__, dtype=struct.dtype)
        return jax.block_until_ready(array)

    total = sum(spec.struct.size * spec.struct.dtype.itemsize for spec in specs.values())
    weights = {}
    with (
        tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar,
        ThreadPoolExecutor(NUM_READERS, thread_name_prefix="load-weights") as readers,
    ):
        for name, array in zip(specs, readers.map(load, specs), strict=True):
            weights[name] = array
            bar.update(array.nbytes)
    return weights


def _assemble(checkpoint: Checkpoint, name: str, spec: WeightSpec) -> np.ndarray:
    tensors = [checkpoint.read(source) for source in spec.sources]
    try:
        array = spec.assemble(*tensors)
    except ValueError as error:  # numpy cannot reshape or concatenate tensors of a wrong shape
        raise _wrong_shape(name, spec, tensors) from error
    if array.shape != spec.struct.shape:
        raise _wrong_shape(name, spec, tensors)
    return array


def _wrong_shape(name: str, spec: WeightSpec, tensors: list[np.ndarray]) -> CorruptCheckpointError:
    found = ", ".join(f"{source} {tensor.shape}" for source, tensor in zip(spec.sources, tensors, strict=True))
    return CorruptCheckpointError(
        f"parameter {name} has shape {spec.struct.shape}, which does not follow from the checkpoint's {found}: the "
        "configuration and the weights belong to different models, or the file is damaged."
    )


def _check_names(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec], ignored_prefixes: tuple[str, ...]) -> None:
    present = checkpoint.tensor_names()
    needed_by = {source: name for name, spec in specs.items() for source in spec.sources}
    if missing := [source for source in needed_by if source not in present]:
        raise CorruptCheckpointError(
            f"{checkpoint.source} lacks {len(missing)} tensors that its configuration calls for: "
            + _some([f"{source} (for {needed_by[source]})" for source in missing])
        )
    unexpected = sorted(
        name
        for name in present - needed_by.keys()
        if not name.endswith(HARMLESS_SUFFIXES)
        and not name.startswith(ignored_prefixes)
        and not (name.endswith("lm_head.weight") and _may_be_tied(checkpoint))
    )
    if unexpected:
        raise CorruptCheckpointError(
            f"{checkpoint.source} has {len(unexpected)} tensors that its configuration does not call for: "
            + _some(unexpected)
        )


def _may_be_tied(checkpoint: Checkpoint) -> bool:
    """Whether an output projection that the model does not read is a copy of the embedding."""
    text_config = checkpoint.config.get("text_config") or {}
    return (checkpoint.config | text_config).get("tie_word_embeddings") is not False


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more." if len(names) > 5 else ".")
