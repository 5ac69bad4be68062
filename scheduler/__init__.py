"""The control plane: who runs in the next step, in which pages. Plain Python and numpy, usable without JAX.

To read in this order: `request` (what a client asked for), `scheduler` (its life), `step_planner` (the decisions),
`running_table` (the running requests as arrays), `kv_pages` (their pages), `step_plan` (one step, exact), `step_batch`
(one step, padded, in one buffer, which `batch_layout` describes).
"""

from jaxllm.scheduler.batch_layout import BatchLayout, Field
from jaxllm.scheduler.buckets import Bucket, declare_buckets, pick_bucket
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerBusyError, SchedulerConfigError
from jaxllm.scheduler.host_tier.page_moves import PageMoves
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.request_options import RequestOptions
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.sampled_tokens import SampledTokens
from jaxllm.scheduler.sampling_row import SamplingRow
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.scheduling_options import SchedulingOptions, TenantConfig
from jaxllm.scheduler.stats import SchedulerStats, StepTokens
from jaxllm.scheduler.step_batch import StepBatch
from jaxllm.scheduler.step_plan import StepOutput, StepPlan

__all__ = [
    "BatchLayout",
    "Bucket",
    "Field",
    "PageMoves",
    "Request",
    "RequestOptions",
    "RequestRefusedError",
    "RequestStatus",
    "RunningTable",
    "SampledTokens",
    "SamplingRow",
    "Scheduler",
    "SchedulerBusyError",
    "SchedulerConfig",
    "SchedulerConfigError",
    "SchedulerStats",
    "SchedulingOptions",
    "StepBatch",
    "StepOutput",
    "StepPlan",
    "StepTokens",
    "TenantConfig",
    "declare_buckets",
    "pick_bucket",
]
