"""What XLA is told about a step's program."""

import os

from jax.sharding import Mesh

from jaxllm.scheduler.buckets import Bucket

Options = dict[str, int | str]

_SMALL_STEP_TOKENS = 48  # of which most are decodes'
_GPU: Options = {
    # It would hand a part of the packed batch to a kernel as it lies there, and Mosaic GPU's kernels refuse what does
    # not lie at a multiple of 16 bytes.
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # XLA saves memory by computing things twice, products of matrices too, once a program's arguments take 80% of the
    # device's. Ours do so on purpose: the KV cache gets what the temporaries leave.
    "xla_disable_hlo_passes": "rematerialization",
}
# The whole step in one CUDA graph: what it leaves out is launched by the host, which for a condition or a loop waits
# for the device. What several GPUs send each other is not in graphs by default, and that stays so. See docs/gpu.md.
_ONE_GPU = _GPU | {
    # XLA's defaults, and loops.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    # Sorts by CUB, for log-probabilities, cannot be in a graph.
    "xla_gpu_enable_cub_radix_sort": False,
}


def compiler_options(bucket: Bucket, mesh: Mesh) -> Options:
    """What does better for us than XLA's defaults. A flag that the user has set in $XLA_FLAGS stays as it is."""
    match mesh.devices.flat[0].platform:
        case "cpu":
            options = _cpu(bucket)
        case "gpu":
            options = _ONE_GPU if mesh.size == 1 else _GPU
        case _:
            options = {}
    set_by_user = {flag.removeprefix("--").split("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if name not in set_by_user}


def _cpu(bucket: Bucket) -> Options:
    """LLVM's level 2 takes less time than 3 and gives faster gathers of pages (decodes of 32 rows: -12%), wider vectors
    a faster softmax over chunks (512 tokens: -9%), but slower decodes, of which small steps mostly consist."""
    options: Options = {"xla_backend_optimization_level": 2}
    is_small = bucket.is_decode_only or bucket.num_tokens <= _SMALL_STEP_TOKENS
    return options if is_small else options | {"xla_cpu_prefer_vector_width": 512}
