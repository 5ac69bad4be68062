"""The engine: the loop, the step program, the KV cache, sampling and detokenization."""
