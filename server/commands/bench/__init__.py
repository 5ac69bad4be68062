"""`jaxllm bench serve`: measures any OpenAI-compatible server over HTTP."""
