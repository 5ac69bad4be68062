"""transformers on torch, from a folder of bfloat16 safetensors: `generate` on the whole batch.

All prompts of a batch have one length, so it needs no padding: its best case.
"""

import argparse
from collections.abc import Sequence

import torch
import transformers
import workload
from workload import TokenIds


def load(args: argparse.Namespace) -> workload.Engine:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)

    @torch.inference_mode()
    def generate(prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
        input_ids = torch.tensor(prompts)
        output_ids = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
        )
        return output_ids[:, input_ids.shape[1] :].tolist()

    return workload.Engine(generate)


if __name__ == "__main__":
    workload.main(load, transformers.__version__)
