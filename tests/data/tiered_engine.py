"""A tiny engine whose device holds less than half of a conversation, and conversations that need all of it again."""

from collections.abc import Sequence
from pathlib import Path

from tiny_models import write_tiny_model
from tiny_tokenizer import write_tokenizer

from jaxllm import LLM, SamplingParams

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "num_pages": 30,  # less than half of what six conversations come to have
    "compilation_cache_dir": "",
}


def write_model(name: str, folder: Path) -> str:
    """The tiny model of this name with a tokenizer. Returns the folder."""
    write_tokenizer(write_tiny_model(name, folder))
    return str(folder)


def tiered_llm(model: str) -> LLM:
    return LLM(model, **OPTIONS, host_kv_gb=0.01, kv_return_by="copy")


def converse(llm: LLM, params: SamplingParams | Sequence[SamplingParams], num_turns: int) -> list[list[int]]:
    """The tokens of six conversations that take turns, each of which needs its history again."""
    vocab_size = llm.engine.vocab_size
    histories = [[(7 * number + 3 * index) % vocab_size for index in range(24)] for number in range(6)]
    for turn in range(num_turns):
        prompts = [{"prompt_token_ids": history} for history in histories]
        for history, output in zip(histories, llm.generate(prompts, params, use_tqdm=False), strict=True):
            history += [*output.outputs[0].token_ids, turn + 1]
    llm.engine.scheduler.check_integrity()
    return histories
