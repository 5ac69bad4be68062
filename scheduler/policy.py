"""Who goes first. One order decides both whom to admit next and whom to preempt."""

from collections.abc import Callable
from typing import Protocol

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.tenants import TenantLedger

Rank = tuple[float, ...]


class Policy(Protocol):
    """An order among requests, which may change as they run."""

    def rank(self, request: Request) -> Rank:
        """The smaller, the sooner. No two requests have the same. Requests of one tenant and priority are ranked
        by arrival."""

    @property
    def preempts(self) -> bool:
        """Whether one that waits may take the room of one that runs with a higher priority number."""


class FirstComeFirstServed:
    """By arrival."""

    def rank(self, request: Request) -> Rank:
        return request.arrival_time, request.arrival_number

    @property
    def preempts(self) -> bool:
        return False


class ByPriority:
    """By priority, then by arrival. Who waits takes the room of those with a higher priority number."""

    def rank(self, request: Request) -> Rank:
        return request.priority, request.arrival_time, request.arrival_number

    @property
    def preempts(self) -> bool:
        return True


class FairShare:
    """By the tokens that the tenant has had for its weight, then by priority and arrival.

    The virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., 2024).
    """

    def __init__(self, ledger: TenantLedger) -> None:
        self._ledger = ledger

    def rank(self, request: Request) -> Rank:
        virtual_tokens = self._ledger.virtual_tokens(request.tenant)
        return virtual_tokens, request.priority, request.arrival_time, request.arrival_number

    @property
    def preempts(self) -> bool:
        return False


def make_policy(name: str, ledger: TenantLedger) -> Policy:
    """The policy of this name in `scheduling_options.POLICIES`."""
    policies: dict[str, Callable[[], Policy]] = {
        "fcfs": FirstComeFirstServed,
        "priority": ByPriority,
        "fair": lambda: FairShare(ledger),
    }
    return policies[name]()
