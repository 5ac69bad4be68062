"""Who runs in the next step, how many tokens each, and in which pages."""

from collections import Counter, deque

import numpy as np

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.errors import RequestRefusedError
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.policy import WaitingQueue, least_urgent, urgency
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.stats import SchedulerStats
from jaxllm.scheduler.step_plan import StepOutput, StepPlan


class Scheduler:
    """Shares the steps of one device and the pages of one KV cache among requests.

    There is one rule. Each running request has tokens that are known and tokens whose keys and values are
    computed; each step lets it catch up by some number of tokens, within one token budget. A prompt catches
    up in chunks, a decoding request by its one new token, and a preempted request starts again from nothing.
    Rows that want one token are served first, then the row in the middle of its prompt, then the waiting
    requests, urgent ones first. When pages run out, the least urgent row gives up its own.

    The caller's loop, with the host one step ahead of the device:

        plan = scheduler.schedule()             # None if nothing can run now
        batch = StepBatch.build(plan, scheduler.table, bucket)
        handle = runner.launch(batch)
        output = scheduler.update(previous_plan, previous_handle.result())

    Any number of plans may be made before the first of them is updated; they are updated in the order in
    which they were made. Not thread-safe: one thread owns a scheduler.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.table = RunningTable(config)
        self._pool = PagePool(config.num_pages)
        self._waiting = WaitingQueue()
        self._requests: dict[str, Request] = {}  # the unfinished ones
        self._in_flight: deque[StepPlan] = deque()
        self._num_arrivals = 0
        self._num_finished: Counter[RequestStatus] = Counter()
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return self.table.num_rows - self.table.num_free_rows

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestRefusedError: its request_id is in use, or it could never run to its end.
        """
        self._refuse_if_unservable(request)
        request.arrival_number = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.push(request)
        self._requests[request.request_id] = request

    def abort_request(self, request_id: str) -> bool:
        """Ends a request in any state and frees its pages. False if no unfinished request has this id."""
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORT)

    def finish_request(self, request_id: str, status: RequestStatus) -> bool:
        """Ends a request for a reason that the scheduler cannot see, such as a stop string or a failed step.

        What a step in flight samples for it will be dropped. False if no unfinished request has this id.
        """
        assert status.is_finished
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, status)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before an update or a new request.

        From here on the table counts the step's tokens as computed. Build the `StepBatch` from the plan
        before anything else is asked of the scheduler.
        """
        num_scheduled_R = self.table.num_wanted_tokens()
        has_preempted = self._give_pages_to_decodes(num_scheduled_R)
        budget = self._fit_chunk(num_scheduled_R)
        if not has_preempted:
            self._admit(num_scheduled_R, budget)
        return self._commit(num_scheduled_R)

    def update(self, plan: StepPlan, sampled_token_ids: np.ndarray) -> StepOutput:
        """Takes in the result of the oldest plan in flight.

        sampled_token_ids: int32[S], what the step sampled for each row of the plan.

        A plan whose step failed is never updated: finish its requests (FINISHED_ERROR) and go on with a later
        plan.
        """
        assert plan in self._in_flight, "a plan is updated once, and before those made after it"
        while self._in_flight.popleft() is not plan:
            pass
        table = self.table
        counts_S = plan.samples & (table.occupancy[plan.rows] == plan.occupancies)
        rows, token_ids = plan.rows[counts_S], sampled_token_ids[counts_S]
        requests = table.requests_of(rows)
        table.append_token(rows, token_ids)

        stops = (table.stop_token_ids[rows] == token_ids[:, None]).any(axis=1)
        is_full = table.num_tokens[rows] == table.max_total_tokens[rows]
        finished = []
        for index in np.flatnonzero(stops | is_full).tolist():
            status = RequestStatus.FINISHED_STOP if stops[index] else RequestStatus.FINISHED_LENGTH
            self._finish(requests[index], status)
            finished.append(requests[index])
        return StepOutput(rows=rows, token_ids=token_ids, requests=requests, finished=finished)

    def stats(self) -> SchedulerStats:
        """A snapshot for operators. Costs a look at each unfinished request."""
        num_requests = Counter(request.status for request in self._requests.values()) + self._num_finished
        num_pages = self._pool.num_pages - 1
        return SchedulerStats(
            num_requests={status: num_requests[status] for status in RequestStatus},
            num_free_pages=self._pool.num_free_pages,
            num_used_pages=num_pages - self._pool.num_free_pages,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """Asserts that no page, row, token or request is lost or owned twice. Slow; for tests."""
        running, waiting = self.table.running_requests, list(self._waiting)
        assert sorted(running + waiting, key=urgency) == sorted(self._requests.values(), key=urgency)
        assert waiting == sorted(waiting, key=urgency)
        assert {request.status for request in waiting} <= {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        self.table.check_integrity()
        assert np.count_nonzero(self.table.num_wanted_tokens() > 1) <= 1, "two rows amid their prompts"
        self._pool.check_integrity(self.table.owned_pages)
        num_pending_R = np.zeros_like(self.table.num_pending_tokens)
        for plan in self._in_flight:
            num_pending_R[plan.rows] += plan.samples & (self.table.occupancy[plan.rows] == plan.occupancies)
        assert (num_pending_R == self.table.num_pending_tokens).all(), "a pending token that no step will bring"

    def _give_pages_to_decodes(self, num_scheduled_R: np.ndarray) -> bool:
        """Gives a page to each one-token row that has filled its own. Preempts until there are enough pages.

        Returns whether it had to preempt.
        """
        table = self.table
        is_full_R = table.num_computed_tokens == table.num_pages * self.config.page_size
        rows = np.flatnonzero((num_scheduled_R == 1) & is_full_R)
        has_preempted = rows.size > self._pool.num_free_pages
        while rows.size > self._pool.num_free_pages:
            self._preempt(least_urgent(table.running_requests), num_scheduled_R)
            rows = rows[num_scheduled_R[rows] == 1]
        if rows.size:
            table.append_page(rows, self._pool.allocate(rows.size))
        return has_preempted

    def _fit_chunk(self, num_scheduled_R: np.ndarray) -> int:
        """Cuts the row in the middle of its prompt down to the budget and to the free pages.

        There is at most one such row, as a request is admitted only with budget that those before it left.
        Returns what is left of the budget.
        """
        budget = self.config.max_num_batched_tokens - int(np.count_nonzero(num_scheduled_R == 1))
        for row in np.flatnonzero(num_scheduled_R > 1).tolist():
            num_computed = int(self.table.num_computed_tokens[row])
            num_pages = int(self.table.num_pages[row]) + self._pool.num_free_pages
            num_fitting = num_pages * self.config.page_size - num_computed
            num_tokens = min(int(num_scheduled_R[row]), budget, num_fitting)
            self._grow(row, num_computed + num_tokens)
            num_scheduled_R[row] = num_tokens
            budget -= num_tokens
        return budget

    def _admit(self, num_scheduled_R: np.ndarray, budget: int) -> None:
        """Starts waiting requests in order, while a row, budget, and pages for all their tokens are free.

        One page for each running row, its next, does not count as free: else a prompt would often be read
        only to be preempted.
        """
        while self._waiting and self.table.num_free_rows and budget:
            request = self._waiting.first
            num_pages = self.config.num_pages_for(request.num_tokens)
            if num_pages > self._pool.num_free_pages - self.num_running:
                break
            num_tokens = min(request.num_tokens, budget)
            self._waiting.remove(request)
            row = self.table.admit(request)
            self._grow(row, num_tokens)
            num_scheduled_R[row] = num_tokens
            budget -= num_tokens

    def _commit(self, num_scheduled_R: np.ndarray) -> StepPlan | None:
        """Makes the plan, and advances the table as if the step had run."""
        table = self.table
        decode_rows, chunk_rows = np.flatnonzero(num_scheduled_R == 1), np.flatnonzero(num_scheduled_R > 1)
        rows = np.concatenate((decode_rows, chunk_rows)).astype(np.int32)
        if not rows.size:
            return None
        num_scheduled_S = num_scheduled_R[rows]
        num_computed_S = table.num_computed_tokens[rows]
        num_pending_S = table.num_pending_tokens[rows]
        samples_S = num_computed_S + num_scheduled_S == table.num_tokens[rows] + num_pending_S
        plan = StepPlan(
            rows=rows,
            num_scheduled_tokens=num_scheduled_S,
            num_computed_tokens=num_computed_S,
            occupancies=table.occupancy[rows],
            samples=samples_S,
            from_device=num_pending_S > 0,
            num_decodes=len(decode_rows),
        )
        table.num_computed_tokens += num_scheduled_R
        table.num_pending_tokens[rows] += samples_S
        self._in_flight.append(plan)
        return plan

    def _grow(self, row: int, num_tokens: int) -> None:
        """Gives a row the pages that it lacks to hold `num_tokens` tokens."""
        num_pages = self.config.num_pages_for(num_tokens) - int(self.table.num_pages[row])
        self.table.append_pages(row, self._pool.allocate(num_pages))

    def _preempt(self, request: Request, num_scheduled_R: np.ndarray) -> None:
        """Sends a running request back to the queue without its pages.

        Its pending tokens are forgotten: they are sampled again, from the same seed, after the recomputation.
        """
        row = request.row
        assert row is not None
        num_scheduled_R[row] = 0
        self._num_preemptions += 1
        self._num_recomputed_tokens += int(self.table.num_computed_tokens[row])
        self._pool.free(self.table.release(row))
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.push(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.row is None:
            self._waiting.remove(request)
        else:
            self._pool.free(self.table.release(request.row))
        request.move_to(status)
        del self._requests[request.request_id]
        self._num_finished[status] += 1

    def _refuse_if_unservable(self, request: Request) -> None:
        name, config = f"request {request.request_id!r}", self.config
        num_prompt_tokens, max_tokens = request.num_prompt_tokens, request.max_tokens
        if request.request_id in self._requests:
            raise RequestRefusedError(f"{name}: this request_id belongs to a request that has not finished")
        if request.status.is_finished:
            raise RequestRefusedError(f"{name} is {request.status.value}: make a new Request to run it again")
        if num_prompt_tokens == 0:
            raise RequestRefusedError(f"{name}: the prompt is empty; it must have at least one token")
        if max_tokens < 1:
            raise RequestRefusedError(f"{name}: max_tokens is {max_tokens:,}; it must be at least 1")
        if num_prompt_tokens >= config.max_model_len:
            raise RequestRefusedError(
                f"{name}: the prompt has {num_prompt_tokens:,} tokens; max_model_len is "
                f"{config.max_model_len:,}, and must hold the prompt and at least one new token. "
                "Shorten the prompt or raise max_model_len."
            )
        num_tokens = self.table.max_total_tokens_of(request)
        num_pages, num_pool_pages = config.num_pages_for(num_tokens), self._pool.num_pages - 1
        if num_pages > num_pool_pages:
            raise RequestRefusedError(
                f"{name}: {num_prompt_tokens:,} prompt tokens and max_tokens {max_tokens:,}, within "
                f"max_model_len {config.max_model_len:,}, make {num_tokens:,} tokens; they need "
                f"{num_pages:,} pages of {config.page_size:,} tokens, and the KV cache has "
                f"{num_pool_pages:,}. Lower max_tokens or give the KV cache more pages."
            )
