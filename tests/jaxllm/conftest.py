"""Models small enough to build in a test, run without a tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from tiny_models import write_tiny_model

from jaxllm.config import EngineConfig, resolve
from jaxllm.engine.runner import Runner
from jaxllm.layers.attention import StepMetadata
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model
from jaxllm.pallas_kernels.ragged_paged_attention import KVCacheSpec, kv_cache_shape
from jaxllm.scheduler import Request, Scheduler, SchedulerConfig, StepBatch, pick


@dataclass
class TinyModel:
    """A tiny model's module and weights, and generation by scheduler and runner."""

    folder: Path
    dtype: str
    max_model_len: int
    mesh: jax.sharding.Mesh = field(init=False)
    model: Model = field(init=False)
    weights: list[jax.Array] = field(init=False)

    def __post_init__(self):
        self.mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        checkpoint = open_checkpoint(self.folder)
        self.model = Model.from_checkpoint(
            checkpoint, dtype=jnp.dtype(self.dtype), max_model_len=self.max_model_len, mesh=self.mesh
        )
        self.weights = self.model.load(checkpoint, progress=False)
        self._forward = None

    def prompt_logits(self, token_ids: Sequence[int], chunk_lens: Sequence[int]) -> np.ndarray:
        """float32 [len(token_ids), V], from a forward pass for each chunk over one cache."""
        T, page_size, P = 64, 8, 8
        if self._forward is None:

            def forward(weights, kv_pages, ids_T, positions_T, kv_lens_S, page_table_SP, cu_q_lens, num_seqs):
                metadata = StepMetadata(
                    positions_T, kv_lens_S, page_table_SP, cu_q_lens, num_seqs, False, "xla"
                )
                module = self.model.bind(weights)
                hidden_TD, kv_pages = module(ids_T, kv_pages, metadata)
                return module.logits(hidden_TD), kv_pages

            self._forward = jax.jit(forward)
        config = self.model.config
        spec = KVCacheSpec(
            num_pages=P + 1,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.dtype(jnp.float32),
        )
        kv_pages = [jnp.zeros(kv_cache_shape(spec), jnp.float32)] * config.num_layers
        page_table_SP = np.random.default_rng(0).permutation(P)[None].astype(np.int32) + 1
        logits, start = [], 0
        for chunk_len in chunk_lens:
            ids_T = np.zeros(T, np.int32)
            ids_T[:chunk_len] = token_ids[start : start + chunk_len]
            positions_T = np.arange(start, start + T, dtype=np.int32)
            kv_lens_S, num_seqs = np.array([start + chunk_len], np.int32), np.array([1], np.int32)
            cu_q_lens = np.array([0, chunk_len], np.int32)
            out, kv_pages = self._forward(
                self.weights, kv_pages, ids_T, positions_T, kv_lens_S, page_table_SP, cu_q_lens, num_seqs
            )
            logits.append(np.asarray(out)[:chunk_len])
            start += chunk_len
        assert start == len(token_ids)
        return np.concatenate(logits)

    def start_runner(self, **options) -> tuple[Runner, EngineConfig]:
        options = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "page_size": 8,
            "num_pages": 64,
            "compilation_cache_dir": "",
            **options,
        }
        config = EngineConfig(model=str(self.folder), dtype=self.dtype, max_model_len=self.max_model_len, **options)
        config = resolve(config, platform="cpu", model_max_len=self.max_model_len)
        runner = Runner(self.model, config, self.mesh)
        runner.start(self.weights)
        return runner, config


def generate(
    runner: Runner,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    num_pages: int | None = None,
    on_plan: Callable[[Scheduler], None] = lambda scheduler: None,
    **sampling,
) -> list[list[int]]:
    """Greedy (or sampled) continuations, one step ahead, with checks of integrity at every step."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            num_pages=num_pages or runner.num_pages,
        )
    )
    requests = [Request(str(i), p, max_tokens=max_tokens, **sampling) for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.add_request(request)
    in_flight = []
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule()
        if plan is not None:
            bucket = pick(runner.ready_buckets, plan.num_tokens, plan.num_seqs, plan.is_decode_only)
            in_flight.append((plan, runner.launch(StepBatch.build(plan, scheduler.table, bucket))))
            on_plan(scheduler)
        if len(in_flight) > (plan is not None):
            done, handle = in_flight.pop(0)
            scheduler.update(done, handle.sampled_token_ids()[: done.num_seqs])
        scheduler.check_integrity()
    return [request.output_token_ids for request in requests]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., TinyModel]:
    """(name, dtype, max_model_len) -> TinyModel, made once for each set of arguments."""
    made = {}

    def make(name: str, dtype: str = "float32", max_model_len: int = 128) -> TinyModel:
        key = name, dtype, max_model_len
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / name
            folder.mkdir()
            write_tiny_model(name, folder)
            made[key] = TinyModel(folder, dtype, max_model_len)
        return made[key]

    return make


@pytest.fixture(scope="session", name="generate")
def _generate():
    return generate
