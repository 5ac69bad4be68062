"""vLLM on CPU, from a folder of bfloat16 safetensors.

Shown at its best: compiled by torch's inductor, no prefix cache, no detokenizing, Intel's OpenMP (see the environment
that offline.py sets), and a KV cache that holds all requests of the benchmark at once.
"""

import argparse
from collections.abc import Sequence

import vllm
import workload
from workload import TokenIds


def load(args: argparse.Namespace) -> workload.Generate:
    llm = vllm.LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=workload.MAX_MODEL_LEN,
        max_num_seqs=max(workload.PREFILL_BATCH, *args.concurrency),
        enable_prefix_caching=False,
    )

    def generate(prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    workload.main(load, vllm.__version__)
