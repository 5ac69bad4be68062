"""What each tenant has had, has running, and may still ask for."""

from dataclasses import dataclass, field

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerBusyError
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduling_options import TenantConfig
from jaxllm.scheduler.token_window import TokenWindow

_MIN_ACCOUNTS = 64  # so many may be open before idle ones are closed


@dataclass(slots=True)
class Account:
    """One tenant's.

    number: of the tenant, for arrays.
    num_unfinished, num_running: its requests.
    window: the tokens that count against max_tokens_per_minute.
    """

    name: str
    number: int
    config: TenantConfig
    num_unfinished: int = 0
    num_running: int = 0
    window: TokenWindow = field(default_factory=TokenWindow)

    @property
    def num_queued(self) -> int:
        return self.num_unfinished - self.num_running

    @property
    def may_run_more(self) -> bool:
        return self.config.max_running is None or self.num_running < self.config.max_running


class TenantLedger:
    """The accounts of the tenants: of all that have requests, and of those that left with something to remember.

    Under the policy "fair" an account counts virtual tokens: those computed for the tenant, divided by its weight. A
    tenant that comes to have requests waiting starts from no fewer than the least of the others that have some, or, if
    nobody waits, than the one that waited last ("Fairness in Serving Large Language Models", Sheng et al., 2024). So
    nobody saves up, and nobody pays for a time in which there was room for all.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._is_fair = config.scheduling_policy == "fair"
        self._accounts: dict[str, Account] = {}
        self._virtual_tokens = np.zeros(0)  # float[n], by the tenant's number
        self._weights = np.ones(0)
        self._free_numbers: list[int] = []
        self._waited_last: Account | None = None
        self._max_accounts = _MIN_ACCOUNTS
        self.limits_running = any(
            tenant.max_running is not None for tenant in (*config.tenants.values(), config.default_tenant)
        )

    @property
    def accounts(self) -> list[Account]:
        return list(self._accounts.values())

    def virtual_tokens(self, tenant: str) -> float:
        return self._virtual_tokens.item(self._accounts[tenant].number)

    def may_run_more(self, tenant: str) -> bool:
        return self._accounts[tenant].may_run_more

    def refuse_over_quota(self, request: Request, now: float) -> None:
        """Raises SchedulerBusyError if the tenant's quota keeps the request out, RequestRefusedError if it always
        will."""
        account = self._accounts.get(request.tenant) or self._open(request.tenant, now)
        config = account.config
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
                f"make up to {num_tokens:,} tokens; max_tokens_per_minute is {limit:,}. Lower max_tokens.",
                param="max_tokens",
            )
        account.window.advance(now)
        if account.window.num_tokens + num_tokens > limit:
            wait_s = account.window.seconds_until(limit - num_tokens, now)
            raise SchedulerBusyError(
                f"{name}: it may take {num_tokens:,} tokens, and {limit - account.window.num_tokens:,} of the "
                f"tenant's max_tokens_per_minute {limit:,} are left. Send it again in {wait_s:,.1f} s.",
                retry_after_s=wait_s,
            )

    def enter(self, request: Request, now: float) -> None:
        """A request that was not refused is queued."""
        request.entry_time = now
        account = self._accounts[request.tenant]
        if self._is_fair and account.num_queued == 0:
            virtual, number = self._virtual_tokens, account.number
            virtual[number] = max(virtual[number], self._least_virtual_tokens())
        account.num_unfinished += 1
        if account.config.max_tokens_per_minute is not None:
            account.window.take(self._reserved_tokens(request), now)

    def start(self, request: Request) -> int:
        """A request gets a row. Returns the tenant's number."""
        account = self._accounts[request.tenant]
        account.num_running += 1
        if account.num_queued == 0:
            self._waited_last = account
        return account.number

    def stop(self, request: Request) -> None:
        """A request loses its row."""
        self._accounts[request.tenant].num_running -= 1

    def leave(self, request: Request) -> None:
        """A request is about to end. It gives back the tokens that it reserved and did not use."""
        account = self._accounts[request.tenant]
        account.num_unfinished -= 1
        if account.config.max_tokens_per_minute is not None:
            num_used = request.num_tokens if request.has_started else 0
            account.window.give_back(self._reserved_tokens(request) - num_used, request.entry_time)

    def charge(self, tenant_numbers: np.ndarray, num_tokens: np.ndarray) -> None:
        """Counts tokens that a step computes: int[R] numbers of tenants, int[R] tokens."""
        virtual = self._virtual_tokens
        virtual += np.bincount(tenant_numbers, num_tokens, minlength=len(virtual)) / self._weights

    def charge_request(self, request: Request, num_tokens: int) -> None:
        """Counts tokens that a step computes for one request."""
        number = self._accounts[request.tenant].number
        self._virtual_tokens[number] += num_tokens / self._weights[number]

    def _open(self, tenant: str, now: float) -> Account:
        if len(self._accounts) >= self._max_accounts:
            self._close_idle(now)
            self._max_accounts = max(_MIN_ACCOUNTS, 2 * len(self._accounts))
        if not self._free_numbers:
            self._free_numbers.append(len(self._weights))
            self._virtual_tokens, self._weights = np.append(self._virtual_tokens, 0.0), np.append(self._weights, 1.0)
        config, number = self._config.tenant(tenant), self._free_numbers.pop()
        self._virtual_tokens[number], self._weights[number] = 0.0, config.weight
        self._accounts[tenant] = account = Account(tenant, number, config)
        return account

    def _close_idle(self, now: float) -> None:
        """Closes the accounts that would be as they are if they were opened again."""
        least = self._least_virtual_tokens()
        for account in self.accounts:
            if account.num_unfinished or account is self._waited_last:
                continue
            account.window.advance(now)
            if not account.window.num_tokens and self._virtual_tokens[account.number] <= least:
                del self._accounts[account.name]
                self._free_numbers.append(account.number)

    def _least_virtual_tokens(self) -> float:
        """Which a tenant has when it comes to have requests waiting."""
        waiting = [account.number for account in self._accounts.values() if account.num_queued]
        if waiting:
            return float(self._virtual_tokens[waiting].min())
        return 0.0 if self._waited_last is None else self._virtual_tokens.item(self._waited_last.number)

    def _reserved_tokens(self, request: Request) -> int:
        return self._config.max_total_tokens(request.num_prompt_tokens, request.max_tokens)
