"""llama.cpp, through llama-cpp-python's low-level calls: several sequences in one context, one batch a step.

Shown at its best: a thread for each core; for each shape of batch a context of just the right size, which the warm-up
makes; the greedy choice by numpy straight from the logits.
"""

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import version
from itertools import batched

import llama_cpp
import numpy as np
import workload
from workload import TokenIds

MAX_BATCH_LEN = 512

Row = tuple[int, int, int, bool]
"""(token id, position, sequence, whether the next token is wanted)"""


class LlamaCpp:
    def __init__(self, gguf: str) -> None:
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # kept: the library holds only its address
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_LEN, 0, 1)
        self._contexts: dict[tuple[int, int], llama_cpp.llama_context_p] = {}

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
        """Prompts of one length: all are prefilled, then all gain a token in each step."""
        prompt_len = len(prompts[0])
        context = self._context(len(prompts), prompt_len + workload.OUTPUT_LEN)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        outputs: list[TokenIds] = [[] for _ in prompts]
        rows = [
            (token, position, sequence, position == prompt_len - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for position in range(prompt_len, prompt_len + max_tokens):
            for part in batched(rows, MAX_BATCH_LEN):
                for sequence, token in self._decode(context, part):
                    outputs[sequence].append(token)
            rows = [(output[-1], position, sequence, True) for sequence, output in enumerate(outputs)]
        return outputs

    def _context(self, num_sequences: int, sequence_len: int) -> llama_cpp.llama_context_p:
        if (num_sequences, sequence_len) not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = num_sequences * sequence_len
            params.n_seq_max = num_sequences
            params.n_batch = params.n_ubatch = MAX_BATCH_LEN
            params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
            self._contexts[num_sequences, sequence_len] = llama_cpp.llama_init_from_model(self._model, params)
        return self._contexts[num_sequences, sequence_len]

    def _decode(self, context: llama_cpp.llama_context_p, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """One step; returns (sequence, most likely next token) of the rows that want it."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return [
            (sequence, self._most_likely(context, i)) for i, (_, _, sequence, is_wanted) in enumerate(rows) if is_wanted
        ]

    def _most_likely(self, context: llama_cpp.llama_context_p, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def load(args: argparse.Namespace) -> workload.Engine:
    return workload.Engine(LlamaCpp(args.model).generate)


if __name__ == "__main__":
    workload.main(load, version("llama-cpp-python"))
