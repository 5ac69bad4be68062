"""transformers on torch, from a folder of bfloat16 safetensors: `generate` on the whole batch.

Shown at its best: prompts of one length need no padding, and the attention is the faster one for each kind of work.
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
        model.set_attn_implementation("sdpa" if max_tokens == 1 else "eager")
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
