"""What a step costs vLLM's scheduler, on the requests of benchmarks/host.py: schedule and update_from_output.

Prints a JSON object for each load and number of rows, in microseconds. Each step's result comes before the next step is
scheduled. What vLLM's model runner does to build a batch is not in it. Prompts are hashed as requests arrive, outside
of what is measured, as with ours.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter

import host_load
import numpy as np
import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": 1_048_576,
}
"""No model runs, but vLLM wants to know one."""


def make_scheduler(num_rows: int, args: argparse.Namespace, model_folder: str) -> Scheduler:
    num_pages = 1 + num_rows * -(-args.max_model_len // args.page_size)
    config = VllmConfig(
        model_config=ModelConfig(
            model=model_folder, max_model_len=args.max_model_len, dtype="bfloat16", skip_tokenizer_init=True
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=host_load.max_num_batched_tokens(num_rows),
            max_model_len=args.max_model_len,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=args.page_size, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_pages
    spec = FullAttentionSpec(block_size=args.page_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv_cache = KVCacheConfig(num_pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, kv_cache, StructuredOutputManager(config), block_size=args.page_size, log_stats=True)


def measure(load: str, num_rows: int, args: argparse.Namespace, model_folder: str) -> np.ndarray:
    """float[num_steps, 2]: seconds of schedule and of update in each measured step."""
    scheduler = make_scheduler(num_rows, args, model_folder)
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(args.page_size, hash_function)
    arrivals = host_load.LOADS[load](num_rows, args.max_model_len)
    results = host_load.sampled_token_ids(num_rows)
    most = host_load.num_unfinished(num_rows)
    seconds, num_added = [], 0
    while len(seconds) < args.warmup + args.steps:
        while len(scheduler.running) + len(scheduler.waiting) < most and (arrival := next(arrivals, None)):
            prompt, max_tokens = arrival
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[host_load.STOP_TOKEN_ID], ignore_eos=True)
            scheduler.add_request(Request(f"r{num_added}", prompt, params, None, block_hasher=hasher))
            num_added += 1
        start = perf_counter()
        plan = scheduler.schedule()
        scheduled = perf_counter()
        request_ids = list(plan.num_scheduled_tokens)
        requests = [scheduler.requests[request_id] for request_id in request_ids]
        sampled = [
            [token_id] if request.num_computed_tokens >= request.num_tokens else []
            for request, token_id in zip(requests, results, strict=False)
        ]
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )
        launched = perf_counter()
        scheduler.update_from_output(plan, output)
        seconds.append((scheduled - start, perf_counter() - launched))
    return np.array(seconds[args.warmup :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--loads", nargs="+", choices=host_load.LOADS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--page-size", type=int, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as model_folder:
        (Path(model_folder) / "config.json").write_text(json.dumps(MODEL))
        for load in args.loads:
            for num_rows in args.rows:
                microseconds = 1e6 * measure(load, num_rows, args, model_folder)
                schedule, update = np.median(microseconds, axis=0)
                total = microseconds.sum(axis=1)
                figures = {"schedule": schedule, "update": update, "best": total.min(), "median": np.median(total)}
                print(json.dumps({"load": load, "rows": num_rows, "version": vllm.__version__, **figures}), flush=True)


if __name__ == "__main__":
    main()
