"""From options to an `EngineCore` that can serve."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jaxllm.config import EngineConfig, ResolvedConfig, resolve
from jaxllm.engine.compilation_cache import use_compilation_cache
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.engine_info import EngineInfo
from jaxllm.engine.runner import Runner
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model, model_max_len
from jaxllm.pallas_kernels.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxllm.scheduler import Scheduler, SchedulerConfig
from jaxllm.scheduler.buckets import mixed_sizes


def open_model(config: EngineConfig) -> Checkpoint:
    """The model's files. Raises ConfigError before, for options that this machine cannot follow."""
    _check_machine(config)
    return open_checkpoint(config.model, revision=config.revision)


def start_core(config: EngineConfig, *, checkpoint: Checkpoint | None = None, progress: bool = False) -> EngineCore:
    """Reads the weights and compiles the first program, side by side.

    checkpoint: by `open_model`, if it is open already.
    progress: shows a bar while the weights are read.
    """
    checkpoint = checkpoint or open_model(config)
    checkpoint.require_tokenizer()  # Those who bring the core its token ids need it, and all else takes long.
    resolved = resolve(config, platform=jax.default_backend(), model_max_len=model_max_len(checkpoint.config))
    mesh = _make_mesh(config.tensor_parallel_size)
    runner = start_runner(resolved, checkpoint, mesh, progress=progress)
    scheduler = Scheduler(_scheduler_config(resolved, runner))
    return EngineCore(resolved, runner, scheduler, _info(resolved, checkpoint, runner, scheduler.config, mesh))


def start_runner(config: ResolvedConfig, checkpoint: Checkpoint, mesh: Mesh, *, progress: bool = False) -> Runner:
    """A runner with the checkpoint's weights, which can launch steps in its largest bucket and soon in others."""
    model = Model.from_checkpoint(
        checkpoint, dtype=jnp.dtype(config.dtype), max_model_len=config.max_model_len, mesh=mesh
    )
    use_compilation_cache(config)
    with ThreadPoolExecutor(1, thread_name_prefix="jaxllm-load") as loader:
        weights = loader.submit(model.load, checkpoint, progress=progress)
        runner = Runner(model, config, mesh)
        runner.start(weights.result())
    return runner


def _check_machine(config: EngineConfig) -> None:
    platform, num_devices = jax.default_backend(), len(jax.devices())
    implementation = config.attention_implementation
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ConfigError(
            f"attention_implementation is {implementation!r}; it must be one of {', '.join(IMPLEMENTATIONS)}, or None "
            "for auto"
        )
    if implementation in {"tpu", "gpu"} - {platform}:
        raise ConfigError(
            f"attention_implementation is {implementation!r} and JAX runs on {platform}: leave it out for auto"
        )
    if config.tensor_parallel_size > num_devices:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; this machine has {num_devices} {platform} "
            "devices. Lower it, or run on more devices."
        )


def _make_mesh(tensor_parallel_size: int) -> Mesh:
    return jax.make_mesh(
        (1, tensor_parallel_size),
        ("data", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=jax.devices()[:tensor_parallel_size],
    )


def _scheduler_config(config: ResolvedConfig, runner: Runner) -> SchedulerConfig:
    return SchedulerConfig.of(
        config.options,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        num_pages=runner.num_pages,
        windows=runner.groups.windows,
        num_host_pages=runner.num_host_pages,
        step_sizes=mixed_sizes(runner.buckets),
    )


def _info(
    config: ResolvedConfig, checkpoint: Checkpoint, runner: Runner, scheduler: SchedulerConfig, mesh: Mesh
) -> EngineInfo:
    device = mesh.devices.flat[0]
    return EngineInfo(
        model=config.options.model,
        revision=config.options.revision,
        max_model_len=scheduler.max_model_len,
        vocab_size=runner.vocab_size,
        page_size=scheduler.page_size,
        num_pages=scheduler.num_pages,
        num_host_pages=runner.num_host_pages,
        page_bytes=runner.page_bytes,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        platform=device.platform,
        device=device.device_kind,
        eos_token_ids=_eos_token_ids(checkpoint),
        enable_prefix_caching=scheduler.enable_prefix_caching,
    )


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The end tokens that the model's configs name; its tokenizer, which is not here, may name another."""
    found: list[int] = []
    for config in (checkpoint.generation_config, checkpoint.config):
        ids = config.get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids] if ids is not None else []
    return tuple(dict.fromkeys(found))
