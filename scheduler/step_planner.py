"""Who runs in the next step, how many tokens each, and in which pages."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.host_tier.page_returns import PageReturns
from jaxllm.scheduler.in_flight import InFlight
from jaxllm.scheduler.kv_pages import KVPages
from jaxllm.scheduler.pacing import Pacing
from jaxllm.scheduler.policy import Policy
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.step_counts import StepCounts
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.scheduler.tenants import TenantLedger
from jaxllm.scheduler.waiting_queue import WaitingQueue

_MAX_DEFERRED = 32  # requests passed over in a step because what they wait for is on its way


class StepPlanner:
    """Moves requests between the queue and the rows, and decides what each row computes in a step.

    There is one rule. Each running request has tokens that are known and tokens whose keys and values are
    computed; each step lets it catch up by some number of tokens, within one token budget. A prompt catches
    up in chunks, a decoding request by its one new token, one with drafts by all of them, and a preempted request
    starts again from what the prefix cache still has, on the device or, after a copy, on the host. Rows that want one
    token are served first, then drafts, then the row in the middle of its prompt, then the waiting requests, in the
    order of the policy. When pages run out, the row that is last in that order gives up its own.

    Within a step, `scheduled_R` (int32[R]) is what each row is to compute.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        table: RunningTable,
        policy: Policy,
        waiting: WaitingQueue,
        tenants: TenantLedger,
        *,
        pages: KVPages,
        pacing: Pacing,
        in_flight: InFlight,
        returns: PageReturns,
    ) -> None:
        self._config = config
        self._table = table
        self._pages = pages
        self._pacing = pacing
        self._in_flight = in_flight
        self._returns = returns
        self._policy = policy
        self._is_fair = config.scheduling_policy == "fair"
        self._waiting = waiting
        self._tenants = tenants
        self._prompt_row: int | None = None  # the one row in the middle of its prompt
        self._has_drafts = False
        self._started: list[Request] = []  # in the step that is being planned
        self.counts = StepCounts(config.max_num_batched_tokens)

    @property
    def num_running(self) -> int:
        return self._table.num_rows - self._table.num_free_rows

    @property
    def _num_reserved_pages(self) -> int:
        """For the running rows: the next page of each, in each group; and what those that wait for pages lack."""
        return self.num_running * self._config.num_groups + self._pages.loads.num_reserved_pages

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run. The table then counts its tokens as computed."""
        self._started = []
        self._pages.leave_windows()
        scheduled_R = self._table.num_wanted_tokens()
        if self._prompt_row is not None and scheduled_R[self._prompt_row] <= 1:
            self._prompt_row = None
        has_preempted = self._give_pages_to_decodes(scheduled_R)
        is_mixed = self._has_drafts and self._add_drafts(scheduled_R)
        if self._is_fair:
            served_R = scheduled_R.copy()
            if self._prompt_row is not None:
                served_R[self._prompt_row] = 0
            self._tenants.charge(self._table.tenant, served_R)
        if self._prompt_row is not None or self._waiting:
            may_admit = not has_preempted and self._pacing.window_s(self._waiting, now) == 0.0
            budget = rest = self._prompt_budget(scheduled_R, now)
            if (reading_row := self._prompt_row) is not None:
                rest = self._read_on(reading_row, scheduled_R, budget, may_admit)
            if may_admit:
                rest = self._admit(scheduled_R, rest, reading_row)
                if len(self._pages.host_slots) and not self._table.num_free_rows:
                    self._prefetch(reading_row)
            is_mixed = is_mixed or rest < budget
        plan = self._commit(scheduled_R, is_mixed, now)
        if self._config.num_host_pages:
            self.counts.note_stall(plan is None and len(self._pages.loads) > 0 and not self._in_flight, now)
        return plan

    def propose(self, request: Request, token_ids: Sequence[int]) -> None:
        """Drafts of the next tokens of a request, for the next step to verify."""
        if request.row is not None and self._table.set_drafts(request.row, token_ids):
            self._has_drafts = True

    def preempt(self, request: Request, scheduled_R: np.ndarray | None = None) -> None:
        """Sends a running request back to the queue without its pages; `scheduled_R` then has nothing for its row.

        Tokens that steps in flight sample for it are still appended when they come; until then it does not start.
        """
        row = cast(int, request.row)
        self._in_flight.await_tokens(request, row)
        if scheduled_R is not None:
            scheduled_R[row] = 0
        self.counts.num_preemptions += 1
        request.num_given_up_tokens = min(int(self._table.num_computed_tokens[row]), request.num_tokens)
        self.leave_rows([request])
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.push(request)

    def leave_rows(self, requests: Sequence[Request]) -> None:
        """Takes rows and pages from running requests."""
        rows = [cast(int, request.row) for request in requests]
        if self._prompt_row in rows:
            self._prompt_row = None
        self._pages.release(np.array(rows))
        for request in requests:
            self._tenants.stop(request)

    def leave_queue(self, request: Request) -> None:
        """Takes out a request that waits, in the queue or for its pages."""
        if request in self._pages.loads:
            self._pages.loads.end(request)
            if not len(self._pages.loads):
                self.counts.forget_stall()
        else:
            self._waiting.remove(request)

    def accept(self, row: int, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """What came of a row's drafts: its new tokens, behind those that were computed before the step."""
        self._table.accept_tokens(row, np.array(token_ids, np.int32), num_computed_tokens)
        self._pages.shrink(row, int(self._table.num_computed_tokens[row]))

    def check_integrity(self) -> None:
        """Asserts that the one row amid its prompt is known. For tests."""
        rows = np.flatnonzero(self._table.num_wanted_tokens() > 1).tolist()
        assert rows in ([], [self._prompt_row]), "a row amid its prompt that nobody reads on"

    # The parts of `plan`, in order.

    def _give_pages_to_decodes(self, scheduled_R: np.ndarray) -> bool:
        """Gives a page to each one-token row that has filled its own. Returns whether it had to preempt for that, or to
        take pages from a request that waits for its own to come from the host."""
        table = self._table
        rows = (table.num_computed_tokens + scheduled_R > table.num_slots).nonzero()[0]
        if self._prompt_row is not None:
            rows = rows[rows != self._prompt_row]
        if not rows.size:
            return False
        has_preempted = rows.size > self._pages.num_growths
        while rows.size > self._pages.num_growths:
            last = max([*table.running_requests, *self._pages.loads.requests], key=self._policy.rank)
            if last in self._pages.loads:
                self._returns.give_up(last)
            else:
                self.preempt(last, scheduled_R)
            rows = rows[scheduled_R[rows] == 1]
        self._pages.grow_by_one(rows)
        return has_preempted

    def _add_drafts(self, scheduled_R: np.ndarray) -> bool:
        """Adds the drafts of decoding rows, as far as budget and free pages go. Returns whether any is in the step.

        Drafts are a chance, so nobody is preempted for them, and each running row's next page stays free.
        """
        table, self._has_drafts = self._table, False
        budget = self._config.max_num_batched_tokens - self._num_served(scheduled_R)
        for row in np.flatnonzero((table.num_draft_tokens > 0) & (scheduled_R == 1)).tolist():
            num_computed, num_slots = int(table.num_computed_tokens[row]), int(table.num_slots[row])
            num_spare = max(0, self._pages.num_growths - self.num_running) * self._config.page_size
            number = min(int(table.num_draft_tokens[row]), budget, num_slots + num_spare - num_computed - 1)
            table.num_draft_tokens[row] = number
            scheduled_R[row] += number
            budget -= number
            self._pages.grow(row, num_computed + 1 + number)
        return bool(table.num_draft_tokens.any())

    def _num_served(self, scheduled_R: np.ndarray) -> int:
        """Tokens of all rows but the one in the middle of its prompt."""
        return int(scheduled_R.sum()) - (0 if self._prompt_row is None else int(scheduled_R[self._prompt_row]))

    def _prompt_budget(self, scheduled_R: np.ndarray, now: float) -> int:
        """Tokens of prompts that the step may read: the rest of the budget, or what the targets allow."""
        num_others = self._num_served(scheduled_R)
        budget = self._config.max_num_batched_tokens - num_others
        if self._config.tpot_target_ms is None:
            return budget
        table, row = self._table, self._prompt_row
        depth = 0 if row is None else table.num_computed_tokens.item(row)
        num_kv_tokens = int(table.num_computed_tokens.sum()) - depth + num_others
        reading = self._first_waiting() if row is None else table.requests[row]
        return self._pacing.most_prompt_tokens(budget, num_others, num_kv_tokens, reading, depth, now)

    def _read_on(self, row: int, scheduled_R: np.ndarray, budget: int, may_admit: bool) -> int:
        """Cuts the row in the middle of its prompt down to the budget and to the free pages.

        There is at most one such row, as a request is admitted only to the rest of the budget. A waiting request of
        lower priority number takes its place, where the cache keeps what has been computed. Returns the rest of the
        budget.
        """
        table = self._table
        if budget and may_admit and self._policy.preempts and self._is_better_read_instead(row):
            self.preempt(table.requests[row], scheduled_R)
            return budget
        num_computed = table.num_computed_tokens.item(row)
        num_fitting = table.num_slots.item(row) + self._pages.num_growths * self._config.page_size - num_computed
        num_tokens = min(int(scheduled_R[row]), budget, num_fitting)
        self._pages.grow(row, num_computed + num_tokens)
        if num_tokens == scheduled_R[row]:
            self._prompt_row = None
        scheduled_R[row] = num_tokens
        if self._is_fair:
            self._tenants.charge_request(table.requests[row], num_tokens)
        return budget - num_tokens

    def _is_better_read_instead(self, row: int) -> bool:
        """Whether the first waiting request outranks the one amid its prompt, would have pages in its place or could
        set out for its own, and would not waste what has been computed for it."""
        pages, request, first = self._pages, self._table.requests[row], self._first_waiting()
        if first is None or first.priority >= request.priority or first.num_awaited_plans:
            return False
        if not pages.cache.serves(request):
            return False
        pages.begin_admissions(None)  # without what this row is going to compute
        shared_pages = pages.match(first)
        prefix = None if shared_pages is None else self._returns.wanted(first, shared_pages)
        if shared_pages is None or (prefix is not None and not self._returns.may_set_out(prefix)):
            return False
        num_spare = pages.num_free_pages + pages.num_freed_by([row], shared_pages)
        num_spare -= self._num_reserved_pages - self._config.num_groups
        return pages.num_missing(first, shared_pages) <= num_spare

    def _admit(self, scheduled_R: np.ndarray, budget: int, reading_row: int | None) -> int:
        """Starts waiting requests in order, while a row, budget, and pages for all their tokens are free.

        Those whose first pages are being computed for another, such as `reading_row`, are passed over; those whose
        pages lie on the host set out to get them. One whose last token is on its way is waited for, so that nobody
        takes its place. Returns the rest of the budget.
        """
        deferred: list[Request] = []
        has_begun, may_set_out = False, True
        while budget > 0 and (self._table.num_free_rows or self._may_take_a_row()):
            request = self._first_waiting()
            if request is None or not (self._table.num_free_rows or self._outranks_some(request)):
                break
            if not has_begun:
                self._pages.begin_admissions(reading_row)
                has_begun = True
            if self._config.prefix_window > 1:
                request = self._waiting.best_of_equals(
                    request, self._config.prefix_window, lambda other: len(self._pages.cache.match(other))
                )
            if request.num_awaited_plans:
                break
            shared_pages = self._pages.match(request)
            prefix = None if shared_pages is None else self._returns.wanted(request, shared_pages)
            if prefix is not None:  # Once one may not, nobody passes it: else it might wait for ever.
                may_set_out = may_set_out and self._returns.may_set_out(prefix)
            if shared_pages is None or (prefix is not None and not may_set_out):
                if len(deferred) == _MAX_DEFERRED:
                    break
                self._waiting.remove(request)
                deferred.append(request)
                continue
            if not self._make_room(request, shared_pages, scheduled_R):
                break
            if prefix is None:
                budget -= self._start(request, shared_pages, scheduled_R, budget)
            else:
                self._returns.begin(request, prefix, shared_pages)
        for request in deferred:
            self._waiting.push(request)
        return budget

    def _prefetch(self, reading_row: int | None) -> None:
        """Lets pages of the next requests set out, beyond what the running rows need."""
        if self._returns.is_prefetch_due(self._first_waiting(), self._table.step_number):
            self._pages.begin_admissions(reading_row)
            num_row_pages = self.num_running * self._config.num_groups
            if self._prompt_row is not None:
                num_row_pages += self._pages.num_lacking(self._prompt_row)
            self._returns.prefetch(num_row_pages, self._first_waiting)

    def _start(self, request: Request, shared_pages: list[int], scheduled_R: np.ndarray, budget: int) -> int:
        """Gives the request a row, pages, and what it may compute in this step. Returns how much that is."""
        if self._config.prefix_window > 1:
            self._waiting.note_overtaking(request)
        if len(self._pages.host_slots):
            self._returns.note_start(request, shared_pages)
        self._waiting.remove(request)
        self._started.append(request)
        num_computed = len(shared_pages) // self._config.num_groups * self._config.page_size
        num_wanted = request.num_tokens - num_computed
        num_tokens = min(num_wanted, budget)
        row = self._table.admit(request, self._tenants.start(request))
        self._pages.admit(row, request, shared_pages, num_computed + num_tokens)
        if request.num_given_up_tokens:
            self.counts.num_recomputed_tokens += max(0, request.num_given_up_tokens - num_computed)
            request.num_given_up_tokens = 0
        scheduled_R[row] = num_tokens
        if self._is_fair:
            self._tenants.charge_request(request, num_tokens)
        if num_tokens < num_wanted:
            self._prompt_row = row
        return num_tokens

    def _commit(self, scheduled_R: np.ndarray, is_mixed: bool, now: float) -> StepPlan | None:
        """Makes the plan, and advances the table as if the step had run."""
        table, num_draft_S = self._table, None
        if is_mixed:
            decode_rows, other_rows = (scheduled_R == 1).nonzero()[0], (scheduled_R > 1).nonzero()[0]
            rows, num_decodes = np.concatenate((decode_rows, other_rows)), len(decode_rows)
        else:
            rows = scheduled_R.nonzero()[0]
            num_decodes = len(rows)
        if not rows.size:
            return None
        num_scheduled_S, num_computed_S = scheduled_R[rows], table.num_computed_tokens[rows]
        num_total_S = table.num_total_tokens[rows]
        from_device_S = num_total_S > table.num_tokens[rows]
        table.num_computed_tokens += scheduled_R
        num_tokens = num_decodes
        if not is_mixed:
            samples_S = num_scheduled_S > 0
            table.num_total_tokens += scheduled_R
        else:
            num_tokens = int(num_scheduled_S.sum())
            num_draft_R = table.num_draft_tokens
            samples_S = table.num_computed_tokens[rows] == num_total_S + num_draft_R[rows]
            table.num_total_tokens[rows] += samples_S
            if num_draft_R.any():
                num_draft_S = num_draft_R[rows]
                table.begin_verification()
        table.step_number += 1
        plan = StepPlan(
            rows=rows,
            num_scheduled_tokens=num_scheduled_S,
            num_computed_tokens=num_computed_S,
            samples=samples_S,
            all_sample=not is_mixed or bool(samples_S.all()),
            from_device=from_device_S,
            num_draft_tokens=num_draft_S,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            step_number=table.step_number,
            started=self._started,
            time=now,
        )
        self._in_flight.push(plan)
        self.counts.add(plan, is_mixed=is_mixed)
        return plan

    def _first_waiting(self) -> Request | None:
        """The next in the order of the policy whose tenant may run more."""
        return self._waiting.first(self._tenants.may_run_more if self._tenants.limits_running else None)

    def _may_take_a_row(self) -> bool:
        """Whether to look for a waiting request that takes the row of a running one."""
        return self._policy.preempts and self._waiting.has_below(int(self._table.priority.max()))

    def _outranks_some(self, request: Request) -> bool:
        """Whether a running request may have to make room for this one."""
        return self._policy.preempts and request.priority < int(self._table.priority.max())

    def _make_room(self, request: Request, shared_pages: list[int], scheduled_R: np.ndarray) -> bool:
        """Whether there are a row and pages for the request, if need be after preempting those that it outranks.

        Reserved pages do not count as free: else a prompt would often be read only to be preempted.
        """
        pages, table, num_groups = self._pages, self._table, self._config.num_groups
        num_free_rows = table.num_free_rows
        num_reserved = (table.num_rows - num_free_rows) * num_groups + pages.loads.num_reserved_pages
        num_spare = pages.pool.num_free_pages - num_reserved
        if num_free_rows and pages.num_missing(request, shared_pages) <= num_spare:
            return True
        if not self._outranks_some(request):
            return False
        outranked = [other for other in table.running_requests if request.priority < other.priority]
        outranked.sort(key=self._policy.rank)
        num_spare += pages.num_freed_by([cast(int, other.row) for other in outranked], shared_pages)
        num_spare += len(outranked) * num_groups
        if pages.num_missing(request, shared_pages) > num_spare:
            return False
        while outranked:
            self.preempt(outranked.pop(), scheduled_R)
            if pages.num_missing(request, shared_pages) <= pages.num_free_pages - self._num_reserved_pages:
                return True
        return False
