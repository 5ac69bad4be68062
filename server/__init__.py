"""What people talk to: the command line, and the HTTP server. They know the engine by jaxllm's public names only.

Rooms, each of which knows only those after it: `commands`, `http`, `api`, `observability`.
"""
