"""vLLM on CPU, from a folder of bfloat16 safetensors.

Shown at its best: compiled by torch's inductor, in one process, with Intel's OpenMP and a thread for each core (by the
environment that offline.py sets), without prefix cache and detokenizing.
"""

import argparse
from collections.abc import Sequence

import vllm
import workload
from workload import TokenIds


def load(args: argparse.Namespace) -> workload.Engine:
    llm = vllm.LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=workload.MAX_MODEL_LEN,
        max_num_seqs=max(*workload.PREFILL_BATCHES, *args.concurrency),
        enable_prefix_caching=False,
    )

    def generate(prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return workload.Engine(generate)


if __name__ == "__main__":
    workload.main(load, vllm.__version__)
