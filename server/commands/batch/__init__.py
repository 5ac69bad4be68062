"""`jaxllm run-batch`: a file of requests, and a file of answers."""
