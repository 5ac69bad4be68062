"""A step of attention to measure kernels by, and what it needs at the very least."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`num_seqs` sequences of `kv_len` tokens each, of which the last `q_len` are in the step.

    `q_len` 1 is a decode, `q_len` equal to `kv_len` a whole prompt. Queries and outputs are bfloat16.
    """

    num_seqs: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    page_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.q_len

    @property
    def pages_per_seq(self) -> int:
        return -(-self.kv_len // self.page_size)

    @property
    def token_kv_bytes(self) -> int:
        """Bytes of K and V of a token, all heads, without padding."""
        import jax.numpy as jnp

        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.kv_dtype).itemsize

    @property
    def kv_bytes(self) -> int:
        """All K and V that the step reads."""
        return self.num_seqs * self.kv_len * self.token_kv_bytes

    @property
    def io_bytes(self) -> int:
        """Queries, outputs, and new K and V (given in bfloat16), each read or written once."""
        return 2 * self.num_tokens * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def least_bytes(self) -> int:
        """What must cross HBM: the older K and V in, queries and new K and V in, outputs and new K and V out."""
        new_kv_bytes = self.num_tokens * self.token_kv_bytes
        return self.kv_bytes - new_kv_bytes + self.io_bytes + new_kv_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions of scores and outputs, without what causality hides."""
        pairs = self.num_seqs * (self.q_len * self.kv_len - self.q_len * (self.q_len - 1) // 2)
        return 4 * pairs * self.num_heads * self.head_dim
