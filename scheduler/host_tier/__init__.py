"""Pages of the KV cache on the host: which lie there, and how they come back."""
