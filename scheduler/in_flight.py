"""The steps that were launched and whose results are not known yet."""

from collections import Counter, deque

import numpy as np

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.step_plan import StepPlan


class InFlight:
    """Plans in the order of their launch, and the preempted requests that they will bring tokens to."""

    def __init__(self, table: RunningTable) -> None:
        self._table = table
        self._plans: deque[StepPlan] = deque()
        self._awaited: dict[tuple[int, int], Request] = {}  # by the plan's step_number and the row

    def __len__(self) -> int:
        return len(self._plans)

    def push(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def pop(self, plan: StepPlan) -> None:
        """The plan's result is known. The steps of those before it have failed, and nothing comes of them."""
        assert plan in self._plans, "a plan is updated once, and before those made after it"
        while self._plans[0] is not plan:
            self.drop(self._plans[0])
        self._plans.popleft()

    def drop(self, plan: StepPlan) -> None:
        """Nothing comes of the plan, or nothing more."""
        if plan in self._plans:
            self._plans.remove(plan)
        for step_number, row in [key for key in self._awaited if key[0] == plan.step_number]:
            self._awaited.pop((step_number, row)).num_awaited_plans -= 1

    def await_tokens(self, request: Request, row: int) -> None:
        """The request is going to lose its row; what plans in flight sample for it there still belongs to it."""
        for plan in self._plans:
            if self._table.released_at[row] < plan.step_number and plan.samples[plan.rows == row].any():
                self._awaited[plan.step_number, row] = request
                request.num_awaited_plans += 1

    def take_awaited(self, plan: StepPlan, row: int) -> Request | None:
        """Whom what the plan sampled in this row belongs to, if its row was taken from it and it has not finished."""
        request = self._awaited.pop((plan.step_number, row), None)
        if request is None:
            return None
        request.num_awaited_plans -= 1
        return None if request.status.is_finished else request

    def check_integrity(self) -> None:
        """Asserts that each pending token is one that a plan will bring. For tests."""
        num_pending_R = np.zeros_like(self._table.num_tokens)
        for plan in self._plans:
            counts_S = plan.samples & (self._table.released_at[plan.rows] < plan.step_number)
            num_pending_R[plan.rows] += counts_S * (1 if plan.num_draft_tokens is None else 1 + plan.num_draft_tokens)
        assert (num_pending_R == self._table.num_pending_tokens).all(), "a pending token that no step will bring"
        awaited = Counter(map(id, self._awaited.values()))
        assert all(awaited[id(request)] == request.num_awaited_plans for request in self._awaited.values())
        assert {number for number, _ in self._awaited} <= {plan.step_number for plan in self._plans}
