"""The command line: `jaxllm serve`, `generate`, `chat`, `run-batch` and `bench`."""
