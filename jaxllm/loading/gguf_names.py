"""Tensor names of GGUF files and the Hugging Face names they stand for."""

import re
from collections.abc import Mapping

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PRE_NORM_NAMES = {"ffn_norm": "post_attention_layernorm"}
SANDWICH_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def huggingface_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    """The Hugging Face name of GGUF tensor `name`, of an architecture with these parts of layers; None if it has no
    such tensor."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    hf_part = layer_names.get(part)
    return hf_part and f"model.layers.{layer}.{hf_part}.{kind}"
