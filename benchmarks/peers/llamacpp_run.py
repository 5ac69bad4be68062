"""llama.cpp, through llama-cpp-python's low-level calls: several sequences in one context, one batch a step.

Shown at its best: for each batch of requests a context of just the right size, made outside of the clock; as many
tokens a step as prompts have; the greedy choice by numpy straight from the logits.
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from itertools import batched

import llama_cpp
import numpy as np
import workload
from workload import TokenIds

MAX_BATCH_LEN = 512


class LlamaCpp:
    def __init__(self, gguf: str, threads: int) -> None:
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)  # kept: the library holds a bare pointer to it
        llama_cpp.llama_log_set(self._silence, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_LEN, 0, 1)
        self._threads = threads
        self._contexts = {}

    def generate(self, prompts: Sequence[TokenIds], max_tokens: int) -> list[TokenIds]:
        context = self._context(len(prompts), len(prompts[0]) + max_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        outputs: list[TokenIds] = [[] for _ in prompts]
        step = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for num_outputs in range(1, max_tokens + 1):
            for part in batched(step, MAX_BATCH_LEN):
                for seq, token in self._decode(context, part):
                    outputs[seq].append(token)
            step = [(output[-1], len(prompts[0]) + num_outputs - 1, seq, True) for seq, output in enumerate(outputs)]
        return outputs

    def _context(self, num_seqs: int, seq_len: int) -> llama_cpp.llama_context_p:
        """The context for this shape; the warm-up makes it, so that no measurement pays for it."""
        if (num_seqs, seq_len) not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = num_seqs * seq_len
            params.n_seq_max = num_seqs
            params.n_batch = params.n_ubatch = MAX_BATCH_LEN
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[num_seqs, seq_len] = llama_cpp.llama_init_from_model(self._model, params)
        return self._contexts[num_seqs, seq_len]

    def _decode(self, context, part: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Runs (token, position, sequence, wants logits) rows; returns (sequence, most likely next token)."""
        batch = self._batch
        batch.n_tokens = len(part)
        for i, (token, position, seq, wants_logits) in enumerate(part):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode gave {status}")
        chosen = []
        for i, (_, _, seq, wants_logits) in enumerate(part):
            if wants_logits:
                logits = llama_cpp.llama_get_logits_ith(context, i)
                chosen.append((seq, int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())))
        return chosen


def load(args: argparse.Namespace) -> workload.Generate:
    return LlamaCpp(args.model, args.threads).generate


if __name__ == "__main__":
    workload.main(load, version("llama-cpp-python"))
