"""`jaxllm chat`: a conversation in a terminal, with a model here or at a server."""
