"""The control plane: who runs in the next step, in which pages. Plain Python and numpy, usable without JAX.

To read in this order: `request` (what a client asked for), `scheduler` (the decisions), `running_table` (the
running requests as arrays), `step_plan` (one step, exact), `step_batch` (one step, padded, in one buffer).
"""

from jaxllm.scheduler.buckets import Bucket, declare_buckets, pick
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.errors import RequestRefusedError, SchedulerConfigError
from jaxllm.scheduler.page_pool import PagePool
from jaxllm.scheduler.request import Request, RequestStatus, SamplingRow
from jaxllm.scheduler.running_table import RunningTable
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stats import SchedulerStats
from jaxllm.scheduler.step_batch import Field, StepBatch, fields
from jaxllm.scheduler.step_plan import StepOutput, StepPlan

__all__ = [
    "Bucket",
    "Field",
    "PagePool",
    "Request",
    "RequestRefusedError",
    "RequestStatus",
    "RunningTable",
    "SamplingRow",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerConfigError",
    "SchedulerStats",
    "StepBatch",
    "StepOutput",
    "StepPlan",
    "declare_buckets",
    "fields",
    "pick",
]
