"""The data plane's hot loops, one folder per operation; usable without the rest of jaxllm."""
