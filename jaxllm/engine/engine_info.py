"""What an engine is, told to whom it serves."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """Facts that hold while an engine lives. The options have the values that "auto" became.

    model, revision: as given; the tokenizer is read from there.
    num_pages: of the KV cache, the null page included.
    num_host_pages: of the host's memory that the KV cache may use beside it.
    page_bytes: of one page, over all devices.
    platform: JAX's name: "cpu", "gpu" or "tpu".
    device: what the hardware is called, such as "TPU v5e".
    eos_token_ids: the model's own end tokens.
    """

    model: str
    revision: str | None = None
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    num_host_pages: int = 0
    page_bytes: int = 0
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kv_cache_dtype: str
    platform: str
    device: str
    eos_token_ids: tuple[int, ...]
    enable_prefix_caching: bool

    def with_tokenizer(self, tokenizer: "PreTrainedTokenizerFast") -> "EngineInfo":
        """With the end token that the tokenizer names beside those of the model's configs."""
        token_id = tokenizer.eos_token_id
        found = [*self.eos_token_ids, *([token_id] if isinstance(token_id, int) else [])]
        return replace(self, eos_token_ids=tuple(dict.fromkeys(found)))
