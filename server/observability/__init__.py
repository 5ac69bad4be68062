"""What is told of requests and of the engine: metrics, logs, traces, and whether it makes progress."""
