"""How an operator wants requests to share the device, whatever the model and the sizes of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxllm.scheduler.errors import SchedulerConfigError

POLICIES = ("priority", "fcfs", "fair")
RETURNS = ("auto", "copy", "recompute")


def check_integers(options: object, minimums: Mapping[str, int]) -> None:
    """Raises SchedulerConfigError for a field that is less than its minimum, or no integer. None passes."""
    for name, minimum in minimums.items():
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < minimum):
            raise SchedulerConfigError(f"{name} is {value!r}; it must be an integer of at least {minimum}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """What one tenant gets. None is no limit.

    weight: its share of the tokens beside other tenants, under the policy "fair".
    max_running: requests that run at once; further ones wait and hold up nobody else.
    max_queued: requests that wait; further ones are refused.
    max_tokens_per_minute: prompt and output of the requests that arrive within any 60 seconds. A request reserves its
        max_tokens when it arrives, and gives back what it did not use when it ends.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    max_tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.weight) and 0.0 < self.weight < float("inf")):
            raise SchedulerConfigError(f"weight is {self.weight!r}; it must be a number above 0")
        check_integers(self, {"max_running": 1, "max_queued": 1, "max_tokens_per_minute": 1})


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Who goes first, who waits, who is refused, and what is kept for later. They are checked at construction.

    enable_prefix_caching: whether requests share the pages of what their prompts begin with.
    kv_return_by: how what lies on the host comes back: "copy", "recompute" (it stays there), or "auto", what is
        estimated to take less time.
    scheduling_policy: who goes first: "priority" (the lower number, then the earlier; a lower number takes room from
        higher ones), "fcfs" (the earlier; priorities are refused) or "fair" (the tenant that has had the fewest tokens
        for its weight, and within a tenant by priority).
    max_queued_requests: requests that may wait, beyond which new ones are refused; None: no limit.
    max_queued_tokens: prompt tokens that may wait, beyond which new requests are refused; None: no limit.
    max_wait_ms: how long a request may wait for others to start with it; 0 starts it at once.
    min_batch: so many waiting requests start without waiting for more, where max_wait_ms is above 0.
    tpot_target_ms: chunks of prompts shrink so that steps beside decodes take no longer than this; None: no target.
    ttft_target_ms: a prompt that has waited so long is read at full speed in spite of tpot_target_ms; None: never.
    tenants: settings of tenants by name, for those that do not get `default_tenant`.
    default_tenant: what each other tenant gets: share, running and waiting requests, tokens for each minute.
    """

    enable_prefix_caching: bool = True
    kv_return_by: str = "auto"
    scheduling_policy: str = "priority"
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_wait_ms: float = 0.0
    min_batch: int = 1
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    default_tenant: TenantConfig = TenantConfig()

    def __post_init__(self) -> None:
        for name, choices in (("scheduling_policy", POLICIES), ("kv_return_by", RETURNS)):
            if (value := getattr(self, name)) not in choices:
                raise SchedulerConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
        check_integers(self, {"max_queued_requests": 1, "max_queued_tokens": 1, "min_batch": 1})
        if not (_is_number(self.max_wait_ms) and 0.0 <= self.max_wait_ms < float("inf")):
            raise SchedulerConfigError(f"max_wait_ms is {self.max_wait_ms!r}; it must be a number, 0 or more")
        if self.min_batch > 1 and self.max_wait_ms == 0:
            raise SchedulerConfigError(
                f"min_batch is {self.min_batch:,} and max_wait_ms is 0: no request waits for others. "
                "Raise max_wait_ms, or leave min_batch at 1."
            )
        for name in ("tpot_target_ms", "ttft_target_ms"):
            if (target := getattr(self, name)) is not None and not (_is_number(target) and target > 0):
                raise SchedulerConfigError(f"{name} is {target!r}; it must be a number above 0, or None for no target")
        if self.ttft_target_ms is not None and self.tpot_target_ms is None:
            raise SchedulerConfigError(
                f"ttft_target_ms is {self.ttft_target_ms} without tpot_target_ms, from which it makes exceptions: "
                "set both, or neither"
            )
        self._check_tenants()

    def check_step_sizes(self, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> None:
        """Raises SchedulerConfigError if the most rows and tokens of a step contradict each other, or these options.
        None is a size that is not decided yet."""
        if max_num_seqs is not None and max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
            raise SchedulerConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens:,} and max_num_seqs is {max_num_seqs:,}: a step "
                "must have room for one token of each running request. Raise the first or lower the second."
            )
        for name, most in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if most is not None and self.min_batch > most:
                raise SchedulerConfigError(
                    f"min_batch is {self.min_batch:,} and {name} is {most:,}: so many never start at once. "
                    "Lower the first or raise the second."
                )

    def _check_tenants(self) -> None:
        if not isinstance(self.tenants, Mapping) or not all(isinstance(name, str) for name in self.tenants):
            raise SchedulerConfigError(f"tenants is {self.tenants!r}; it must be a mapping of names to TenantConfigs")
        named = {f"the tenant {name!r}": tenant for name, tenant in self.tenants.items()}
        for name, tenant in {"default_tenant": self.default_tenant, **named}.items():
            if not isinstance(tenant, TenantConfig):
                raise SchedulerConfigError(f"{name} is {tenant!r}; it must be a TenantConfig")
            if tenant.weight != 1.0 and self.scheduling_policy != "fair":
                raise SchedulerConfigError(
                    f"the weight of {name} is {tenant.weight}, and scheduling_policy is {self.scheduling_policy!r}, "
                    "which knows none. Leave the weight at 1, or set scheduling_policy to 'fair'."
                )
