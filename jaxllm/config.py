"""The engine's options."""

from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.options import checked_options
from jaxllm.scheduler import scheduling_options
from jaxllm.scheduler.scheduling_options import SchedulingOptions, check_integers

DTYPES = ("bfloat16", "float32", "float16")
_MINIMUMS = {
    "max_model_len": 2,  # A prompt token and a new one.
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "page_size": 1,
    "num_pages": 2,  # The null page and a real one.
    "tensor_parallel_size": 1,
    "seed": 0,
}


@checked_options(ConfigError)
class TenantConfig(scheduling_options.TenantConfig):
    __doc__ = scheduling_options.TenantConfig.__doc__


@checked_options(ConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingOptions):
    """How to serve a model. None means "auto": `resolve` turns it into a value.

    model: hub id, folder, .gguf file, or the demo model "smollm2-135m".
    revision: branch, tag or commit of a hub id.
    dtype: of the weights and of the products: "bfloat16" (auto), "float32", "float16" (not Gemma 3, which overflows in
        it).
    kv_cache_dtype: of the cached keys and values; auto: the weights' dtype.
    max_model_len: the most tokens of a request, prompt and output together; auto: what the model was made
        for, on CPU at most 8,192.
    max_num_seqs: requests that run at once; auto: 256, 32 on CPU, never below min_batch.
    max_num_batched_tokens: the token budget of a step; auto: 2,048, 512 on CPU, never below max_num_seqs.
    page_size: tokens in a page of the KV cache; auto: 64.
    num_pages: pages of the KV cache, the null page included; auto: what fits into the memory.
    memory_utilization: the part of the device's memory that weights, programs and KV cache may take together;
        auto: 0.9. On CPU the part of the host's memory that the KV cache may take; auto: 0.05.
    tensor_parallel_size: devices over which each layer is split.
    attention_implementation: "tpu", "gpu", "xla" or "reference"; auto: "tpu" on a TPU; "gpu" on a GPU of NVIDIA's
        Hopper (H100, H200) for what its kernels can do; else "xla".
    compilation_cache_dir: where compiled programs persist; auto: ~/.cache/jaxllm, or what JAX is set to; ""
        for none.
    host_kv_gb: memory of the host, in GB (10^9 bytes), that keeps what the KV cache of the device has no room for, and
        from where it is copied back when a request needs it; 0 for none.
    seed: of the requests that bring none.

    The others are those of `SchedulingOptions`.
    """

    model: str
    revision: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    attention_implementation: str | None = None
    compilation_cache_dir: str | None = None
    host_kv_gb: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, _MINIMUMS)
        self.check_step_sizes(self.max_num_seqs, self.max_num_batched_tokens)
        for name, choices in (("dtype", DTYPES), ("kv_cache_dtype", DTYPES)):
            if (value := getattr(self, name)) not in (None, *choices):
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}, or None for auto")
        if not (isinstance(self.host_kv_gb, int | float) and 0.0 <= self.host_kv_gb < float("inf")):
            raise ConfigError(f"host_kv_gb is {self.host_kv_gb!r}; it must be a number, 0 or more")
        if self.host_kv_gb and not self.enable_prefix_caching:
            raise ConfigError(
                f"host_kv_gb is {self.host_kv_gb} and enable_prefix_caching is False: what lies on the host is found "
                "by the prefix cache. Enable prefix caching, or leave host_kv_gb at 0."
            )
        utilization = self.memory_utilization
        if utilization is not None and not (isinstance(utilization, Real) and 0.0 < utilization <= 1.0):
            raise ConfigError(f"memory_utilization is {utilization!r}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """What "auto" became.

    options: as they were given.
    """

    options: EngineConfig
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    memory_utilization: float
    compilation_cache_dir: str

    @property
    def max_pages_per_seq(self) -> int:
        """P: pages of a request that has max_model_len tokens."""
        return -(-self.max_model_len // self.page_size)


def resolve(config: EngineConfig, *, platform: str, model_max_len: int) -> ResolvedConfig:
    """The values for a platform ("cpu", "gpu", "tpu") and a model made for sequences of `model_max_len` tokens.

    Raises ConfigError if max_model_len is beyond that.
    """
    on_cpu = platform == "cpu"
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len:,}; the model was made for {model_max_len:,} tokens. "
            "Lower max_model_len, or let a RoPE scaling in the model's config (yarn, linear, dynamic) reach that far."
        )
    max_num_seqs = config.max_num_seqs or max(32 if on_cpu else 256, config.min_batch)
    if config.max_num_seqs is None and config.max_num_batched_tokens is not None:
        max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens)
    dtype = config.dtype or "bfloat16"
    cache_dir = config.compilation_cache_dir
    return ResolvedConfig(
        options=config,
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype or dtype,
        max_model_len=config.max_model_len or (min(model_max_len, 8192) if on_cpu else model_max_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(512 if on_cpu else 2048, max_num_seqs),
        page_size=config.page_size or 64,
        memory_utilization=config.memory_utilization or (0.05 if on_cpu else 0.9),
        compilation_cache_dir=str(Path.home() / ".cache" / "jaxllm") if cache_dir is None else cache_dir,
    )
