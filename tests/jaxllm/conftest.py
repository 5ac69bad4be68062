"""Models small enough to build in a test, by their parts or as a whole `LLM`; and the demo model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from tiny_models import write_tiny_model
from tiny_tokenizer import write_tokenizer

from jaxllm import LLM
from jaxllm.config import EngineConfig, ResolvedConfig, resolve
from jaxllm.engine.kv_cache import KVCacheLayout
from jaxllm.engine.runner import Runner
from jaxllm.engine.step_command import StepCommand
from jaxllm.layers.kv_caches import KVCaches
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.loading.sources import open_checkpoint
from jaxllm.models.model import Model
from jaxllm.scheduler import Request, Scheduler, SchedulerConfig, StepBatch, pick_bucket

# No test may find what another run has left: programs compiled for a TPU cannot even be read again without one.
jax.config.update("jax_enable_compilation_cache", False)


class Forward:
    """The logits of a prompt at every position, without scheduler and runner."""

    T, PAGE_SIZE = 64, 8

    def __init__(self, model: Model, mesh: Mesh, max_len: int):
        self._layout = KVCacheLayout.of(
            model.config.cache_specs,
            max_len,
            page_size=self.PAGE_SIZE,
            dtype=jnp.dtype(jnp.float32),
            implementation="xla",
            mesh=mesh,
        )

        def forward(weights, kv_pages, ids_T, positions_T, kv_lens_S, page_table_GSP, cu_q_lens, num_seqs):
            metadata = StepMetadata(positions_T, kv_lens_S, cu_q_lens, num_seqs, False, "xla")
            module = model.bind(weights)
            caches = KVCaches(kv_pages, page_table_GSP, self._layout.groups, self.PAGE_SIZE)
            hidden_TD = module(module.embed(ids_T), caches, metadata)
            return module.logits(hidden_TD), caches.arrays

        # Made for a few calls: here quick compilation is worth more than quick code.
        self._forward = jax.jit(forward, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
        self._mesh = mesh
        self._max_pages = -(-max_len // self.PAGE_SIZE)

    def __call__(self, weights: list[jax.Array], token_ids: Sequence[int], chunk_lens: Sequence[int]) -> np.ndarray:
        """float32 [len(token_ids), V], from a forward pass for each chunk over one cache."""
        T, P, G = self.T, self._max_pages, self._layout.groups.num_groups
        kv_pages = self._layout.allocate(G * P + 1)
        page_table_GSP = np.random.default_rng(0).permutation(G * P).reshape(G, 1, P).astype(np.int32) + 1
        logits, start = [], 0
        for chunk_len in chunk_lens:
            ids_T = np.zeros(T, np.int32)
            ids_T[:chunk_len] = token_ids[start : start + chunk_len]
            positions_T = np.arange(start, start + T, dtype=np.int32)
            kv_lens_S, num_seqs = np.array([start + chunk_len], np.int32), np.array([1], np.int32)
            cu_q_lens = np.array([0, chunk_len], np.int32)
            with jax.set_mesh(self._mesh):
                out, kv_pages = self._forward(
                    weights, kv_pages, ids_T, positions_T, kv_lens_S, page_table_GSP, cu_q_lens, num_seqs
                )
            logits.append(np.asarray(out)[:chunk_len])
            start += chunk_len
        assert start == len(token_ids)
        return np.concatenate(logits)


@dataclass
class TinyModel:
    """A tiny model's module and weights, and generation by scheduler and runner."""

    folder: Path
    dtype: str
    max_model_len: int
    mesh: Mesh = field(init=False)
    model: Model = field(init=False)
    weights: list[jax.Array] = field(init=False)

    def __post_init__(self):
        self.mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        checkpoint = open_checkpoint(self.folder)
        self.model = Model.from_checkpoint(
            checkpoint, dtype=jnp.dtype(self.dtype), max_model_len=self.max_model_len, mesh=self.mesh
        )
        self.weights = self.model.load(checkpoint, progress=False)
        self._forward = Forward(self.model, self.mesh, max_len=96)

    def prompt_logits(self, token_ids: Sequence[int], chunk_lens: Sequence[int]) -> np.ndarray:
        """float32 [len(token_ids), V]. See `Forward`."""
        return self._forward(self.weights, token_ids, chunk_lens)

    def start_runner(self, **options) -> tuple[Runner, ResolvedConfig]:
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
    config: ResolvedConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    *,
    num_pages: int | None = None,
    enable_prefix_caching: bool = True,
    on_plan: Callable[[Scheduler], None] = lambda scheduler: None,
    **options,
) -> list[list[int]]:
    """Greedy (or sampled) continuations, one step ahead, with checks of integrity at every step."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            num_pages=num_pages or runner.num_pages,
            windows=runner.groups.windows,
            enable_prefix_caching=enable_prefix_caching,
        )
    )
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    requests = [
        Request(str(i), prompt, max_tokens=limit, **options)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    for request in requests:
        scheduler.add_request(request)
    in_flight = []
    while scheduler.has_unfinished_requests:
        plan = scheduler.schedule()
        if plan is not None:
            bucket = pick_bucket(runner.ready_buckets, plan.num_tokens, plan.num_seqs, plan.max_q_len)
            batch = StepBatch.build(plan, scheduler.table, bucket)
            in_flight.append((plan, runner.launch(StepCommand(scheduler.take_page_moves(), bucket, batch.buffer))))
            on_plan(scheduler)
        if len(in_flight) > (plan is not None):
            done, handle = in_flight.pop(0)
            scheduler.update(done, handle.sampled(done.num_seqs))
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


@pytest.fixture(scope="session", name="write_tokenizer")
def _write_tokenizer():
    return write_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer: everything that an `LLM` needs."""
    folder = write_tiny_model("llama", tmp_path_factory.mktemp("tiny-llm"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def _tiny_llm(tiny_folder) -> Iterator[LLM]:
    llm = LLM(
        str(tiny_folder),
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=128,
        page_size=8,
        num_pages=16 * 16 + 1,
        compilation_cache_dir="",
    )
    llm.engine.runner.wait_until_compiled()
    yield llm
    llm.engine.shutdown()


@pytest.fixture(scope="session")
def _demo_llm() -> Iterator[LLM]:
    llm = LLM(
        "smollm2-135m",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=2048,
        num_pages=300,
        compilation_cache_dir="",
    )
    llm.engine.runner.wait_until_compiled()
    yield llm
    llm.engine.shutdown()


@pytest.fixture
def tiny_llm(_tiny_llm) -> Iterator[LLM]:
    """An `LLM` of 16 rows, 128 tokens a step and max_model_len 128, whose programs are compiled; float32."""
    yield _tiny_llm
    assert_idle(_tiny_llm)


@pytest.fixture
def demo_llm(_demo_llm) -> Iterator[LLM]:
    """SmolLM2-135M, 8 rows, 128 tokens a step, max_model_len 2,048, whose programs are compiled; float32."""
    yield _demo_llm
    assert_idle(_demo_llm)


def assert_idle(llm: LLM) -> None:
    """Whatever a test did, nothing of it may be left."""
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert scheduler.stats().num_used_pages == 0
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.abort_all() == []


@pytest.fixture(scope="session")
def make_forward() -> type[Forward]:
    return Forward
