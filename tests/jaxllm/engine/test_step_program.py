"""What reaches the sampler, and what comes back from a step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine import step_program
from jaxllm.engine.device_state import DeviceState
from jaxllm.engine.kv_cache import KVCacheLayout
from jaxllm.engine.runner import StepHandle
from jaxllm.engine.sampler import Logprobs, Sampled
from jaxllm.engine.step_program import StepResult, make_step
from jaxllm.layers.cache_spec import CacheSpec
from jaxllm.scheduler import (
    BatchLayout,
    Bucket,
    Request,
    SamplingRow,
    Scheduler,
    SchedulerConfig,
    StepBatch,
    batch_layout,
    running_table,
)
from jaxllm.scheduler.sampling_row import setting


@dataclass(frozen=True)
class WithBonus(SamplingRow):
    bonus: float = setting(0.25, np.float32, "above 0", lambda value: value > 0)


@pytest.fixture
def _bonus_is_declared(monkeypatch):
    """As if `SamplingRow` had one setting more. Nothing else changes."""
    for module in (batch_layout, running_table):
        monkeypatch.setattr(module, "SamplingRow", WithBonus)
    BatchLayout.of.cache_clear()
    yield
    BatchLayout.of.cache_clear()


class NoModel:
    def bind(self, weights):
        return self

    def embed(self, token_ids_T):
        return token_ids_T[:, None]

    def __call__(self, x_TD, caches, metadata):
        return x_TD

    def logits(self, hidden_SD):
        return jnp.zeros((hidden_SD.shape[0], 8), jnp.float32)


@pytest.mark.usefixtures("_bonus_is_declared")
def test_a_setting_reaches_the_sampler_by_its_declaration_alone(monkeypatch):
    def sample(logits_SV, params, positions_S):
        assert list(params) == [*SamplingRow.dtypes(), "bonus"]
        assert params["bonus"].dtype == jnp.float32
        return Sampled((100 * params["bonus"]).astype(jnp.int32), params["top_k"] == 3)

    monkeypatch.setattr(step_program, "sample", sample)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=16, page_size=8, num_pages=9)
    scheduler = Scheduler(config)
    for name, sampling in {"a": WithBonus(top_k=3, bonus=0.5), "b": WithBonus(top_k=3), "c": WithBonus()}.items():
        scheduler.add_request(Request(name, [1, 2], max_tokens=2, sampling=sampling))
    plan = scheduler.schedule()
    batch = StepBatch.build(plan, scheduler.table, Bucket.mixed(8, 4))
    assert batch.bonus.tolist() == [0.5, 0.25, 0.25, 0.25]  # The last one is padding.
    spec, mesh = CacheSpec(num_kv_heads=1, head_dim=16), jax.make_mesh((1, 1), ("data", "model"))
    caches = KVCacheLayout.of([spec], 16, page_size=8, dtype=jnp.dtype("float32"), implementation="xla", mesh=mesh)
    step = jax.jit(make_step(NoModel(), batch.layout, caches))
    _, state, result = step([], [], DeviceState(jnp.zeros(5, jnp.int32)), batch.buffer)
    assert state.last_token_ids.tolist() == [50, 25, 25, 0, 25]
    sampled = StepHandle(result).sampled(plan.num_seqs)
    assert sampled.num_tokens.tolist() == [1, 1, 0]
    assert sampled.token_ids.tolist() == [[50], [25], [25]]
    assert [request.request_id for request in scheduler.end_unsound(plan, sampled)] == ["c"]
    output = scheduler.update(plan, sampled)
    assert {request.request_id: tokens for request, tokens in output.tokens_by_request()} == {"a": [50], "b": [25]}
    scheduler.check_integrity()


def test_a_setting_out_of_its_declared_range_is_refused():
    with pytest.raises(ValueError, match="bonus is -1; it must be above 0"):
        WithBonus(bonus=-1)


def test_a_result_has_room_for_several_tokens_a_row():
    packed = jnp.asarray([[2, 1, 0], [5, 6, 7], [8, 9, 10]], jnp.int32)
    sampled = StepHandle(StepResult(sampled=packed, logprobs=Logprobs(*[jnp.zeros(3)] * 3))).sampled(2)
    assert sampled.num_tokens.tolist() == [2, 1]
    assert sampled.token_ids.tolist() == [[5, 8], [6, 9]]
