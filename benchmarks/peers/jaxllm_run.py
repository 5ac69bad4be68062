"""jaxllm with its defaults."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version

import workload
from workload import TokenIds

from jaxllm import LLM, SamplingParams


def load(args: argparse.Namespace) -> workload.Engine:
    llm = LLM(args.model, max_model_len=workload.MAX_MODEL_LEN)

    def generate(prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return workload.Engine(generate, settle=llm.engine.runner.wait_until_compiled)


if __name__ == "__main__":
    workload.main(load, version("jaxllm"))
