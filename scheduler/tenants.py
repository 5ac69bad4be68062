"""What each tenant has had, has running, and may still ask for."""

from dataclasses import dataclass

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig, TenantConfig
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerBusyError
from jaxllm.scheduler.request import Request


@dataclass(slots=True)
class Account:
    """One tenant's.

    number: of the tenant, for arrays.
    virtual_tokens: computed for it, divided by its weight; raised to the least active tenant's when it comes back
        from having no requests, so that nobody saves up.
    num_unfinished, num_running: its requests.
    allowance_tokens: left of max_tokens_per_minute at `allowance_time`; it fills evenly.
    """

    name: str
    number: int
    config: TenantConfig
    virtual_tokens: float = 0.0
    num_unfinished: int = 0
    num_running: int = 0
    allowance_tokens: float = 0.0
    allowance_time: float = 0.0

    @property
    def num_queued(self) -> int:
        return self.num_unfinished - self.num_running

    @property
    def may_run_more(self) -> bool:
        return self.config.max_running is None or self.num_running < self.config.max_running

    def charge(self, num_tokens: float) -> None:
        """Counts tokens that a step computes for the tenant."""
        self.virtual_tokens += num_tokens / self.config.weight


class TenantLedger:
    """The accounts of all tenants."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._accounts: dict[str, Account] = {}
        self._by_number: list[Account] = []
        self.limits_running = any(
            tenant.max_running is not None for tenant in (*config.tenants.values(), config.default_tenant)
        )

    @property
    def accounts(self) -> list[Account]:
        return self._by_number

    def account(self, tenant: str) -> Account:
        """Opened when first asked for."""
        if tenant not in self._accounts:
            config = self._config.tenant(tenant)
            self._accounts[tenant] = account = Account(tenant, len(self._by_number), config)
            account.allowance_tokens = config.max_tokens_per_minute or 0
            self._by_number.append(account)
        return self._accounts[tenant]

    def may_run_more(self, tenant: str) -> bool:
        return self.account(tenant).may_run_more

    def refuse_over_quota(self, request: Request, now: float) -> None:
        """Raises SchedulerBusyError if the tenant's quota keeps the request out, RequestRefusedError if it always
        will."""
        account, config = self.account(request.tenant), self._config.tenant(request.tenant)
        name = f"request {request.request_id!r} of tenant {request.tenant!r}"
        if config.max_queued is not None and account.num_queued >= config.max_queued:
            raise SchedulerBusyError(
                f"{name}: {account.num_queued:,} of the tenant's requests are queued; max_queued is "
                f"{config.max_queued:,}. Send it again when some of them have finished."
            )
        if config.max_tokens_per_minute is None:
            return
        num_tokens, limit = self._reserved_tokens(request), config.max_tokens_per_minute
        if num_tokens > limit:
            raise RequestRefusedError(
                f"{name}: its prompt of {request.num_prompt_tokens:,} tokens and max_tokens {request.max_tokens:,} "
                f"make up to {num_tokens:,} tokens; max_tokens_per_minute is {limit:,}. Lower max_tokens."
            )
        self._refill(account, limit, now)
        if (missing := num_tokens - account.allowance_tokens) > 0:
            wait_s = missing * 60.0 / limit
            raise SchedulerBusyError(
                f"{name}: it may take {num_tokens:,} tokens, and {account.allowance_tokens:,.0f} of the "
                f"tenant's max_tokens_per_minute {limit:,} are left. Send it again in {wait_s:,.1f} s.",
                retry_after_s=wait_s,
            )

    def enter(self, request: Request, now: float) -> None:
        """A request has been queued."""
        account = self.account(request.tenant)
        if account.num_unfinished == 0:
            active = [other.virtual_tokens for other in self._by_number if other.num_unfinished]
            account.virtual_tokens = max(account.virtual_tokens, min(active, default=0.0))
        account.num_unfinished += 1
        if (limit := account.config.max_tokens_per_minute) is not None:
            self._refill(account, limit, now)
            account.allowance_tokens -= self._reserved_tokens(request)

    def leave(self, request: Request) -> None:
        """A request has finished. It gives back the tokens that it reserved and did not make."""
        account = self.account(request.tenant)
        account.num_unfinished -= 1
        if account.config.max_tokens_per_minute is not None:
            account.allowance_tokens += self._reserved_tokens(request) - request.num_tokens

    def charge(self, tenant_numbers: np.ndarray, num_tokens: np.ndarray) -> None:
        """Counts tokens that a step computes: int[R] numbers of tenants, int[R] tokens."""
        totals = np.bincount(tenant_numbers, num_tokens)
        for number in np.flatnonzero(totals).tolist():
            self._by_number[number].charge(float(totals[number]))

    def _reserved_tokens(self, request: Request) -> int:
        return self._config.max_total_tokens(request.num_prompt_tokens, request.max_tokens)

    @staticmethod
    def _refill(account: Account, limit: int, now: float) -> None:
        earned = max(0.0, now - account.allowance_time) * limit / 60.0
        account.allowance_tokens = min(float(limit), account.allowance_tokens + earned)
        account.allowance_time = now
