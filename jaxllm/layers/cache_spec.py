"""What one layer keeps of the tokens it has seen."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The keys and values of each token, or, with a sliding window, of the last tokens.

    A model states one for each of its layers. From them follow the groups of layers, the bytes and the number of pages,
    what is refused, and how the cache is split over devices. A layer that keeps something else (a latent vector for all
    heads, another layer's cache, a state of fixed size for each row) will have a type of its own beside this one.

    sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None: all.
    num_copies: how often each of the model's heads is among the `num_kv_heads`, one after the other (`split`).
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    num_copies: int = 1

    @property
    def token_size(self) -> int:
        """How many numbers are kept of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    def split(self, num_devices: int) -> "CacheSpec":
        """The spec with heads for every device: if the model has fewer than there are devices, some hold the same one.

        Raises ValueError for a number of heads of which devices would have unequal shares.
        """
        if self.num_kv_heads % num_devices == 0:
            return self
        if num_devices % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} KV heads cannot be shared out equally among {num_devices} devices")
        return replace(self, num_kv_heads=num_devices, num_copies=num_devices // self.num_kv_heads)
