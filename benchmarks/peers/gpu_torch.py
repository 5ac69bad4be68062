"""Attention in torch as gpu/attention.py measures it: scaled_dot_product_attention; FlashInfer and vLLM over pages.

A child of gpu/attention.py (see gpu/jobs.py): `python gpu_torch.py SYSTEM JOBS_FILE`, with a Python that has torch; it
needs nothing else. Calls are timed as in gpu/timing.py, but in a CUDA graph in place of a program.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

try:
    import torch
except ImportError as error:
    print(json.dumps({"unavailable": f"{sys.executable} cannot import torch: {error}"}), flush=True)
    raise SystemExit from None

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.jobs import serve
from benchmarks.gpu.steps import Job
from benchmarks.kernel_workload import Workload

KEY_STD = 16.0  # As in gpu/jax_kernels.py, and for its reason.
SAMPLE_S = 0.05
LATENCY_SAMPLES = 20
WORKSPACE_BYTES = 256 << 20
VLLM_SEGMENTS = 16  # Of a sequence, as vLLM takes on Hopper.


@dataclass(frozen=True)
class Calls:
    """call(q, place) returns the next call's q."""

    call: Callable[[torch.Tensor, Any], torch.Tensor]
    q: torch.Tensor
    places: list[Any]


Variants = Iterator[tuple[str, Calls]]


def sdpa(job: Job, device: str) -> Variants:
    """On contiguous K and V [B, K, S, H], with each backend; decodes also with the heads of a KV head as rows of it."""
    step = job.step
    B, N, K, H = step.num_seqs, step.num_heads, step.num_kv_heads, step.head_dim
    shape = (B, K, step.kv_len, H)
    places = [(KEY_STD * _normal(shape, device), _normal(shape, device)) for _ in range(job.num_places)]
    q_shapes = {"heads": (B, N, step.q_len, H)}
    if job.is_decode:
        q_shapes["heads as rows"] = (B, K, N // K, H)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for name, q_shape in q_shapes.items():
            options = {"is_causal": not job.is_decode, "enable_gqa": q_shape[1] != K}

            def call(q: torch.Tensor, place: Any, backend: Any = backend, options: Any = options) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, *place, **options)

            yield f"{backend.name.lower()}, {name}", Calls(call, _normal(q_shape, device), places)


def flashinfer(job: Job, device: str) -> Variants:
    """Over pages [page, 2, K, page_size, H]; the plan, which the host makes once a step, is not timed."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    step = job.step
    S, N, K, H, page_size = step.num_seqs, step.num_heads, step.num_kv_heads, step.head_dim, step.page_size
    cache = _normal((job.num_pages, 2, K, page_size, H), device)
    cache[:, 0] *= KEY_STD
    num_pages = S * step.pages_per_seq
    pages = torch.randperm(job.num_pages - 1)[: job.num_places * num_pages].reshape(job.num_places, num_pages) + 1
    indptr = torch.arange(S + 1, dtype=torch.int32) * step.pages_per_seq
    last_page_lens = torch.full((S,), (step.kv_len - 1) % page_size + 1, dtype=torch.int32)
    starts = torch.arange(S + 1, dtype=torch.int32) * step.q_len

    def place(indices: torch.Tensor, use_tensor_cores: bool) -> Any:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        table = (indptr.to(device), indices.to(device, torch.int32), last_page_lens.to(device))
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        if job.is_decode:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=use_tensor_cores)
            wrapper.plan(*table, N, K, H, page_size, **dtypes)
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            wrapper.plan(starts.to(device), *table, N, K, H, page_size, causal=True, **dtypes)
        return wrapper

    q = _normal((step.num_tokens, N, H), device)
    for use_tensor_cores in (True, False) if job.is_decode else (True,):
        places = [place(indices, use_tensor_cores) for indices in pages]
        name = "tensor cores" if use_tensor_cores else "without tensor cores"
        yield name, Calls(lambda q, wrapper: wrapper.run(q, cache), q, places)


def vllm(job: Job, device: str) -> Variants:
    """Its Triton kernel, K and V apart [page, page_size, K, H]; decodes with sequences in segments too, or whole."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    step = job.step
    S, N, K, H = step.num_seqs, step.num_heads, step.num_kv_heads, step.head_dim
    shape = (job.num_pages, step.page_size, K, H)
    k_pages, v_pages = KEY_STD * _normal(shape, device), _normal(shape, device)
    pages = torch.randperm(job.num_pages - 1)[: job.num_places * S * step.pages_per_seq] + 1
    tables = pages.reshape(job.num_places, S, step.pages_per_seq).to(device, torch.int32)
    options = {
        "k": k_pages,
        "v": v_pages,
        "cu_seqlens_q": torch.arange(S + 1, dtype=torch.int32, device=device) * step.q_len,
        "max_seqlen_q": step.q_len,
        "seqused_k": torch.full((S,), step.kv_len, dtype=torch.int32, device=device),
        "max_seqlen_k": step.kv_len,
        "softmax_scale": H**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
    }
    variants: dict[str, dict[str, Any]] = {"whole": {}}
    if job.is_decode:
        parts = (S, N, VLLM_SEGMENTS)
        scratch = [torch.empty(size, device=device) for size in ((*parts, H), parts, parts)]
        names = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
        variants["segments"] = {
            "seq_threshold_3D": S,
            "num_par_softmax_segments": VLLM_SEGMENTS,
            **dict(zip(names, scratch, strict=True)),
        }
    for name, more in variants.items():

        def call(q: torch.Tensor, table: torch.Tensor, more: dict[str, Any] = more) -> torch.Tensor:
            out = torch.empty_like(q)
            unified_attention(q=q, out=out, block_table=table, **options, **more)
            return out

        yield name, Calls(call, _normal((step.num_tokens, N, H), device), list(tables))


SYSTEMS = {"torch": sdpa, "flashinfer": flashinfer, "vllm": vllm}


@torch.inference_mode()
def measure(system: str, job: Job, samples: int) -> dict[str, Any]:
    """Figures of the system's fastest variant, as `gpu_jax.measure` gives them."""
    figures: dict[str, dict[str, float]] = {}
    failure: Exception | None = None
    for name, calls in SYSTEMS[system](job, "cuda"):
        try:
            figures[name] = time_calls(calls, job.num_calls, samples)
        except RuntimeError as error:  # What no backend can do is said so.
            failure = error
        torch.cuda.empty_cache()
    if failure is not None and not figures:
        raise failure
    best = min(figures, key=lambda name: figures[name]["median_s"])
    return {**figures[best], "variant": best, "variants_s": {name: each["median_s"] for name, each in figures.items()}}


def time_calls(calls: Calls, num_calls: int, samples: int) -> dict[str, float]:
    def run(count: int) -> torch.Tensor:
        q = calls.q
        for i in range(count):
            q = calls.call(q, calls.places[i % len(calls.places)])
        return q

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # A graph can be captured after a first run, on a stream that is not the default.
        run(num_calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run(num_calls)
    latency_s = median(_seconds(lambda: run(1), 1) for _ in range(LATENCY_SAMPLES))
    graph.replay()
    num_replays = ceil(SAMPLE_S / _seconds(graph.replay, 1))
    seconds = [_seconds(graph.replay, num_replays) / num_calls for _ in range(samples)]
    return {
        "median_s": median(seconds),
        "best_s": min(seconds),
        "latency_s": latency_s,
        "calls_per_program": num_calls,
    }


def _seconds(launch: Callable[[], object], count: int) -> float:
    """Of a launch, with all done before and after `count` of them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def _normal(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def main() -> None:
    system, jobs_file = sys.argv[1:]
    if why := _unavailable(system):
        print(json.dumps({"unavailable": why}), flush=True)
        return

    def run(job: dict[str, Any]) -> dict[str, Any]:
        samples = job.pop("samples")
        answer = measure(system, Job(**{**job, "step": Workload(**job["step"])}), samples)
        return {**answer, "torch": torch.__version__}

    serve(run, jobs_file)


def _unavailable(system: str) -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA device"
    if system != "torch" and importlib.util.find_spec(system) is None:
        return f"{sys.executable} has no {system}"
    return None


if __name__ == "__main__":
    main()
