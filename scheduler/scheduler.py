"""The life of requests: queued, planned for, given their tokens, ended."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.deadlines import Deadlines
from jaxllm.scheduler.endings import ending, up_to_end
from jaxllm.scheduler.errors import RequestRefusedError
from jaxllm.scheduler.host_tier.page_moves import PageMoves
from jaxllm.scheduler.host_tier.page_returns import PageReturns
from jaxllm.scheduler.in_flight import InFlight
from jaxllm.scheduler.kv_pages import KVPages
from jaxllm.scheduler.pacing import Pacing
from jaxllm.scheduler.policy import make_policy
from jaxllm.scheduler.refusals import refuse_if_full, refuse_if_unservable
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.sampled_tokens import SampledTokens
from jaxllm.scheduler.stats import SchedulerStats
from jaxllm.scheduler.step_plan import StepOutput, StepPlan
from jaxllm.scheduler.step_planner import StepPlanner
from jaxllm.scheduler.tenants import TenantLedger
from jaxllm.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Shares the steps of one device and the pages of one KV cache among requests.

    What a step consists of is decided by the `StepPlanner`. The caller's loop, with the host one step ahead of the
    device:

        expired = scheduler.expire()            # requests whose time is over
        plan = scheduler.schedule()             # None if nothing can run now
        moves = scheduler.take_page_moves()     # copies of pages before the step, and without one
        batch = StepBatch.build(plan, scheduler.table, bucket)
        handle = runner.launch(StepCommand(moves, bucket, batch.buffer))
        output = scheduler.update(previous_plan, previous_handle.sampled(previous_plan.num_seqs))

    Any number of plans may be made before the first of them is updated; they are updated in the order in
    which they were made. Not thread-safe: one thread owns a scheduler.

    clock: in seconds; the times of the requests are its.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.table = RunningTable(config)
        self._clock = clock
        self._tenants = TenantLedger(config)
        policy = make_policy(config.scheduling_policy, self._tenants)
        self._waiting = WaitingQueue(policy)
        self._pages = KVPages(config, self.table)
        self._pacing = Pacing(config)
        self._in_flight = InFlight(self.table)
        self._returns = PageReturns(config, self._pages, self._waiting, self._pacing)
        self._planner = StepPlanner(
            config,
            self.table,
            policy,
            self._waiting,
            self._tenants,
            pages=self._pages,
            pacing=self._pacing,
            in_flight=self._in_flight,
            returns=self._returns,
        )
        self._preparing: dict[str, Request] = {}  # those that wait for their input
        self._num_preparing_tokens = 0
        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._deadlines = Deadlines(self._requests)
        self._num_arrivals = 0
        self._num_finished: Counter[RequestStatus] = Counter()
        self._num_accepted_tokens = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Of the unfinished requests."""
        return list(self._requests)

    @property
    def num_running(self) -> int:
        return self._planner.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting) + len(self._preparing) + len(self._pages.loads)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestRefusedError: its request_id is in use, or it could never run to its end.
            SchedulerBusyError: the queue, or the tenant's quota, is full for now.
        """
        if request.request_id in self._requests:
            raise RequestRefusedError(
                f"request {request.request_id!r}: this request_id belongs to a request that has not finished"
            )
        now = self._clock()
        refuse_if_unservable(request, self.config)
        refuse_if_full(request, self.config, self.num_waiting, self._num_queued_tokens)
        self._tenants.refuse_over_quota(request, now)
        self._pages.prepare(request)
        self._tenants.enter(request, now)
        request.arrival_number = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._deadlines.add(request)
        if request.status is RequestStatus.WAITING_FOR_INPUT:
            self._preparing[request.request_id] = request
            self._num_preparing_tokens += request.num_tokens
        else:
            self._waiting.push(request)

    def input_ready(self, request_id: str) -> bool:
        """The input of a request that was not ready is. It takes the place in line that its arrival gives it.

        False if no unfinished request of this id waits for its input.
        """
        request = self._preparing.pop(request_id, None)
        if request is None:
            return False
        self._num_preparing_tokens -= request.num_tokens
        request.move_to(RequestStatus.WAITING)
        self._waiting.push(request)
        return True

    def abort_request(self, request_id: str) -> bool:
        """Ends a request in any state and frees its pages. False if no unfinished request has this id."""
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORT)

    def finish_request(self, request_id: str, status: RequestStatus) -> bool:
        """Ends a request for a reason that the scheduler cannot see, such as a stop string or a failed step.

        What a step in flight samples for it will be dropped. After FINISHED_ERROR nobody else will find what is
        in its pages. False if no unfinished request has this id.
        """
        assert status.is_finished
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, status)
        return True

    def expire(self) -> list[Request]:
        """Ends the requests whose deadline has passed, or that have waited for longer than they wanted to."""
        expired = []
        for request in self._deadlines.passed(self._clock()):
            self._finish(request, RequestStatus.FINISHED_TIMEOUT)
            expired.append(request)
        return expired

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Drafts of the next tokens of some decoding requests, by request_id, which the next step is to verify.

        A request whose last token is still on the device takes none, nor one that does not run; and where budget,
        pages or max_tokens leave no room, drafts are dropped. What came of them is told to `update`.
        """
        for request_id, token_ids in drafts.items():
            if (request := self._requests.get(request_id)) is not None:
                self._planner.propose(request, token_ids)

    def set_step_sizes(self, sizes: Iterable[int]) -> None:
        """The padded sizes of steps with prompts from here on: those of `SchedulerConfig.step_sizes` that there are
        programs for. The last of them is always among them."""
        self._pacing.set_step_sizes(sizes, self._clock())

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before an update, a new request, or `wait_s`.

        From here on the table counts the step's tokens as computed. Build the `StepBatch` from the plan
        before anything else is asked of the scheduler.
        """
        return self._planner.plan(self._clock())

    def take_page_moves(self) -> PageMoves:
        """After each `schedule`: what pages are to be copied where before its step is launched, and without one.

        What comes of it is told to `pages_saved`, `pages_loaded` and `load_failed` between steps.
        """
        loads = self._pages.loads
        return PageMoves(loads.take_writes(), self._pages.host_slots.take_saves(), loads.take_begun())

    def pages_saved(self, slots: Sequence[int], *, is_sound: bool) -> None:
        """Copies to these slots of the host were made, or failed."""
        self._pages.host_slots.end_save(slots, is_sound=is_sound)

    def pages_loaded(self, ticket: int, num_pages: int, seconds: float) -> None:
        """The next `num_pages` pages of a load have come, after so many seconds. The next `take_page_moves` says where
        they go, and `schedule` counts them as written."""
        self._returns.take_in(ticket, num_pages, seconds)

    def load_failed(self, ticket: int) -> None:
        """The next pages of a load cannot be read. Its request computes again what has not come."""
        self._returns.fail(ticket)

    @property
    def is_waiting_for_pages(self) -> bool:
        """Whether some request waits for pages from the host."""
        return bool(len(self._pages.loads))

    @property
    def wait_s(self) -> float:
        """After `schedule` gave None with nothing in flight: seconds until the merge window ends, 0 without one.

        A new request may end it sooner.
        """
        return self._pacing.window_s(self._waiting, self._clock())

    def update(self, plan: StepPlan, sampled: SampledTokens) -> StepOutput:
        """Takes in what the oldest plan in flight has sampled. Requests without a token were ended (`end_unsound`).

        A plan whose step failed is never updated: see `drop`.
        """
        self._in_flight.pop(plan)
        self._pacing.note_result(plan, self._clock())
        table, rows, token_ids, others = self.table, plan.rows, sampled.token_ids[:, 0], None
        if plan.num_draft_tokens is not None or table.last_release >= plan.step_number:
            counts_S, others = self._take_in_others(plan, sampled)
            rows, token_ids = rows[counts_S], token_ids[counts_S]
        elif not plan.all_sample:
            rows, token_ids = rows[plan.samples], token_ids[plan.samples]
        requests = table.requests_of(rows)
        num_tokens = table.append_token(rows, token_ids)
        ends: dict[Request, RequestStatus] = {}
        may_end = table.may_stop(token_ids) | (num_tokens == table.max_total_tokens[rows])
        for index in may_end.nonzero()[0].tolist():
            request = requests[index]
            status = ending(request, token_ids.item(index), num_tokens.item(index), self.config)
            if status is not None:
                ends[request] = status
        if ends:
            self._planner.leave_rows(list(ends))
        for request, status in ends.items():
            self._close(request, status)
        output = StepOutput(rows, np.ones(len(rows), np.int32), token_ids, requests, list(ends))
        return output if others is None else output.joined(others)

    def drop(self, plan: StepPlan) -> None:
        """The plan's step has failed, and nothing comes of it; nobody waits for its tokens any more.

        The caller ends the requests that have rows in it (FINISHED_ERROR); unless it is known that the step left what
        others may find as it should be, it resets the prefix cache too.
        """
        self._in_flight.drop(plan)

    def end_unsound(self, plan: StepPlan, sampled: SampledTokens) -> list[Request]:
        """Before the plan's `update`: ends the requests (FINISHED_ERROR) that have no token, as there was nothing to
        sample from.

        Returns the requests. Nobody will find what is in their pages; the other rows of the step are not concerned.
        """
        ended = []
        for index in np.flatnonzero(plan.samples & (sampled.num_tokens == 0)).tolist():
            row = plan.rows.item(index)
            if self.table.released_at[row] < plan.step_number:
                request = self.table.requests[row]
            else:
                request = self._in_flight.take_awaited(plan, row)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ERROR)
                ended.append(request)
        return ended

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Makes the prefix cache forget all, as when the weights have changed.

        While requests run it refuses and returns False; with `force` it preempts them, in order, and what they
        compute again comes from new weights only. What is on its way from the host is not wanted any more.
        """
        if self.num_running and not force:
            return False
        for request in self.table.running_requests:
            self._planner.preempt(request)
        for request in self._pages.loads.requests:
            self._returns.give_up(request)
        self._pages.forget_all()
        return True

    def stats(self) -> SchedulerStats:
        """A snapshot for operators, at a cost that does not depend on the load."""
        table, counts, pages = self.table, self._planner.counts, self._pages
        pool, cache, host_slots, loads = pages.pool, pages.cache, pages.host_slots, pages.loads
        num_preempted = self._waiting.num_preempted
        num_prefilling = int(np.count_nonzero(table.num_total_tokens - table.num_computed_tokens > 1))
        num_requests = {status: self._num_finished[status] for status in RequestStatus} | {
            RequestStatus.WAITING_FOR_INPUT: len(self._preparing),
            RequestStatus.WAITING: len(self._waiting) - num_preempted,
            RequestStatus.WAITING_FOR_PAGES: len(loads),
            RequestStatus.PREFILLING: num_prefilling,
            RequestStatus.DECODING: self.num_running - num_prefilling,
            RequestStatus.PREEMPTED: num_preempted,
        }
        arrivals = [request.arrival_time for request in loads.requests]
        if (oldest := self._waiting.oldest_arrival_time) is not None:
            arrivals.append(oldest)
        return SchedulerStats(
            num_requests=num_requests,
            num_queued_tokens=self._num_queued_tokens,
            queue_age_s=max(0.0, self._clock() - min(arrivals)) if arrivals else 0.0,
            num_free_pages=pool.num_free_pages,
            num_used_pages=pool.num_pages - 1 - pool.num_free_pages,
            num_cached_pages=pool.num_cached_pages,
            num_left_pages=pages.num_left_pages,
            num_host_pages=len(host_slots),
            num_saved_pages=host_slots.num_saved_pages,
            num_loaded_pages=loads.num_loaded_pages,
            num_lost_pages=host_slots.num_lost_pages,
            num_failed_pages=host_slots.num_failed_pages,
            num_stalls=counts.num_stalls,
            stall_s=counts.stall_s,
            num_preemptions=counts.num_preemptions,
            num_recomputed_tokens=counts.num_recomputed_tokens,
            num_prefix_query_tokens=cache.num_queried_tokens,
            num_prefix_hit_tokens=cache.num_hit_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            last_step=counts.last_step,
            all_steps=counts.all_steps,
            steps_by_size=counts.steps_by_size,
        )

    def check_integrity(self) -> None:
        """Asserts that no page, row, token or request is lost or owned twice. Slow; for tests."""
        running, waiting = self.table.running_requests, list(self._waiting)
        loading = self._pages.loads.requests
        everybody = [*running, *waiting, *loading, *self._preparing.values()]
        assert sorted(map(id, everybody)) == sorted(map(id, self._requests.values()))
        assert {request.status for request in waiting} <= {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        assert {request.status for request in loading} <= {RequestStatus.WAITING_FOR_PAGES}
        assert self._num_preparing_tokens == sum(request.num_tokens for request in self._preparing.values())
        self._waiting.check_integrity()
        for part in (self.table, self._pages, self._in_flight, self._planner):
            part.check_integrity()
        for account in self._tenants.accounts:
            own = [request for request in everybody if request.tenant == account.name]
            assert account.num_unfinished == len(own)
            assert account.num_running == sum(request.row is not None for request in own)

    @property
    def _num_queued_tokens(self) -> int:
        num_loading = sum(request.num_tokens for request in self._pages.loads.requests)
        return self._waiting.num_tokens + self._num_preparing_tokens + num_loading

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.row is not None:
            self._planner.leave_rows([request])
        elif self._preparing.pop(request.request_id, None) is not None:
            self._num_preparing_tokens -= request.num_tokens
        else:
            self._planner.leave_queue(request)
        if status is RequestStatus.FINISHED_ERROR and request.has_started:
            self._pages.forget(request)
        self._close(request, status)

    def _close(self, request: Request, status: RequestStatus) -> None:
        """Ends a request that has neither a row nor a place in line."""
        self._tenants.leave(request)
        request.move_to(status)
        del self._requests[request.request_id]
        self._num_finished[status] += 1

    def _take_in_others(
        self, plan: StepPlan, sampled: SampledTokens
    ) -> tuple[np.ndarray, list[tuple[int, Request, list[int]]]]:
        """Takes in what is not simply the next token of a running row: verified drafts, and tokens of requests that
        were preempted since the plan was made.

        Returns bool[S], where it is the next token of a running row, and (row, request, its new tokens) of the others.
        """
        table, others = self.table, []
        is_gone_S = table.released_at[plan.rows] >= plan.step_number
        is_simple_S = plan.samples & ~is_gone_S
        if plan.num_draft_tokens is not None:
            is_simple_S &= plan.num_draft_tokens == 0
        for index in np.flatnonzero(plan.samples & ~is_simple_S).tolist():
            row, num_sampled = plan.rows.item(index), sampled.num_tokens.item(index)
            request = self._in_flight.take_awaited(plan, row) if is_gone_S[index] else table.requests[row]
            if request is None:
                continue
            token_ids, status = up_to_end(request, sampled.token_ids[index, :num_sampled].tolist(), self.config)
            if is_gone_S[index]:
                self._waiting.append_tokens(request, token_ids)
            else:
                self._num_accepted_tokens += num_sampled - 1
                self._planner.accept(row, token_ids, int(plan.num_computed_tokens[index]))
            others.append((row, request, token_ids))
            if status is not None:
                self._finish(request, status)
        return is_simple_S, others
