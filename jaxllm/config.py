"""The engine's options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.options import refuse_unknown_options
from jaxllm.scheduler.config import RETURNS, TenantConfig

DTYPES = ("bfloat16", "float32", "float16")
_NO_LIMITS = TenantConfig()
SCHEDULING_POLICIES = ("priority", "fcfs", "fair")
_MINIMUMS = {
    "max_model_len": 2,  # A prompt token and a new one.
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "page_size": 1,
    "num_pages": 2,  # The null page and a real one.
    "tensor_parallel_size": 1,
    "max_queued_requests": 1,
    "max_queued_tokens": 1,
    "min_batch": 1,
    "seed": 0,
}


@refuse_unknown_options(ConfigError)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to serve a model. None means "auto": `resolve` turns it into a value.

    model: hub id, folder, .gguf file, or the demo model "smollm2-135m".
    revision: branch, tag or commit of a hub id.
    dtype: of the weights and of the products: "bfloat16" (auto), "float32", "float16" (not Gemma 3, which overflows in
        it).
    kv_cache_dtype: of the cached keys and values; auto: the weights' dtype.
    max_model_len: the most tokens of a request, prompt and output together; auto: what the model was made
        for, on CPU at most 8,192.
    max_num_seqs: requests that run at once; auto: 256, 32 on CPU.
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
    enable_prefix_caching: whether requests share the pages of what their prompts begin with.
    host_kv_gb: memory of the host, in GB (10^9 bytes), that keeps what the KV cache of the device has no room for, and
        from where it is copied back when a request needs it; 0 for none.
    kv_return_by: how what lies there comes back: "copy", "recompute" (it stays there), or "auto", what is estimated
        to take less time.
    scheduling_policy: who goes first: "priority" (the lower number, then the earlier), "fcfs" (the earlier) or
        "fair" (the tenant that has had the fewest tokens for its weight).
    max_queued_requests: requests that may wait, beyond which new ones are refused; None: no limit.
    max_queued_tokens: prompt tokens that may wait, beyond which new requests are refused; None: no limit.
    max_wait_ms: how long a request may wait for others to start with it; 0 starts it at once.
    min_batch: so many waiting requests start without waiting for more, where max_wait_ms is above 0.
    tpot_target_ms: chunks of prompts shrink so that steps beside decodes take no longer than this; None: no target.
    ttft_target_ms: a prompt that has waited so long is read at full speed in spite of tpot_target_ms; None: never.
    tenants: settings of tenants by name, for those that do not get `default_tenant`.
    default_tenant: what each other tenant gets: share, running and waiting requests, tokens for each minute.
    seed: of the requests that bring none.
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
    enable_prefix_caching: bool = True
    host_kv_gb: float = 0.0
    kv_return_by: str = "auto"
    scheduling_policy: str = "priority"
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_wait_ms: float = 0.0
    min_batch: int = 1
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    default_tenant: TenantConfig = _NO_LIMITS
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("dtype", DTYPES), ("kv_cache_dtype", DTYPES)):
            if (value := getattr(self, name)) not in (None, *choices):
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}, or None for auto")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ConfigError(
                f"scheduling_policy is {self.scheduling_policy!r}; it must be one of {', '.join(SCHEDULING_POLICIES)}"
            )
        if self.kv_return_by not in RETURNS:
            raise ConfigError(f"kv_return_by is {self.kv_return_by!r}; it must be one of {', '.join(RETURNS)}")
        if not (isinstance(self.host_kv_gb, int | float) and 0.0 <= self.host_kv_gb < float("inf")):
            raise ConfigError(f"host_kv_gb is {self.host_kv_gb!r}; it must be a number, 0 or more")
        if self.host_kv_gb and not self.enable_prefix_caching:
            raise ConfigError(
                f"host_kv_gb is {self.host_kv_gb} and enable_prefix_caching is False: what lies on the host is found "
                "by the prefix cache. Enable prefix caching, or leave host_kv_gb at 0."
            )
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
        utilization = self.memory_utilization
        if utilization is not None and not (isinstance(utilization, Real) and 0.0 < utilization <= 1.0):
            raise ConfigError(f"memory_utilization is {utilization!r}; it must be above 0 and at most 1")
        if not (isinstance(self.max_wait_ms, int | float) and 0.0 <= self.max_wait_ms < float("inf")):
            raise ConfigError(f"max_wait_ms is {self.max_wait_ms!r}; it must be a number, 0 or more")
        for name in ("tpot_target_ms", "ttft_target_ms"):
            target = getattr(self, name)
            if target is not None and not (isinstance(target, int | float) and target > 0):
                raise ConfigError(f"{name} is {target!r}; it must be a number above 0, or None for no target")
        if self.ttft_target_ms is not None and self.tpot_target_ms is None:
            raise ConfigError(
                f"ttft_target_ms is {self.ttft_target_ms} without tpot_target_ms, from which it makes exceptions: "
                "set both, or neither"
            )
        for name, tenant in (("default_tenant", self.default_tenant), *_tenants(self.tenants)):
            if not isinstance(tenant, TenantConfig):
                raise ConfigError(f"{name} is {tenant!r}; it must be a TenantConfig")
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {tokens:,} and max_num_seqs is {seqs:,}: a step must have room "
                "for one token of each running request. Raise the first or lower the second."
            )


def _tenants(tenants: object) -> list[tuple[str, object]]:
    if not isinstance(tenants, Mapping) or not all(isinstance(name, str) for name in tenants):
        raise ConfigError(f"tenants is {tenants!r}; it must be a mapping of names to TenantConfigs")
    return [(f"the tenant {name!r}", tenant) for name, tenant in tenants.items()]


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with a value for each "auto". num_pages stays None where it follows from the memory."""

    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int | None
    memory_utilization: float
    tensor_parallel_size: int
    attention_implementation: str | None
    compilation_cache_dir: str
    enable_prefix_caching: bool
    host_kv_gb: float
    kv_return_by: str
    scheduling_policy: str
    max_queued_requests: int | None
    max_queued_tokens: int | None
    max_wait_ms: float
    min_batch: int
    tpot_target_ms: float | None
    ttft_target_ms: float | None
    tenants: Mapping[str, TenantConfig]
    default_tenant: TenantConfig
    seed: int

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
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    if config.max_num_seqs is None and config.max_num_batched_tokens is not None:
        max_num_seqs = min(max_num_seqs, config.max_num_batched_tokens)
    dtype = config.dtype or "bfloat16"
    cache_dir = config.compilation_cache_dir
    return ResolvedConfig(
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype or dtype,
        max_model_len=config.max_model_len or (min(model_max_len, 8192) if on_cpu else model_max_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(512 if on_cpu else 2048, max_num_seqs),
        page_size=config.page_size or 64,
        num_pages=config.num_pages,
        memory_utilization=config.memory_utilization or (0.05 if on_cpu else 0.9),
        tensor_parallel_size=config.tensor_parallel_size,
        attention_implementation=config.attention_implementation,
        compilation_cache_dir=str(Path.home() / ".cache" / "jaxllm") if cache_dir is None else cache_dir,
        enable_prefix_caching=config.enable_prefix_caching,
        host_kv_gb=config.host_kv_gb,
        kv_return_by=config.kv_return_by,
        scheduling_policy=config.scheduling_policy,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_wait_ms=config.max_wait_ms,
        min_batch=config.min_batch,
        tpot_target_ms=config.tpot_target_ms,
        ttft_target_ms=config.ttft_target_ms,
        tenants=config.tenants,
        default_tenant=config.default_tenant,
        seed=config.seed,
    )
