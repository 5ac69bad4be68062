"""A tokenizer for the 256 ids of a tiny model: unk, bos and eos, and a token for each byte from 3 on."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TINY_CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant") %}
{{- raise_exception("no role is called " + message.role) }}
{%- endif %}
{{- "[" + message.role + "]" + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% endif %}"""

TOOL_CHAT_TEMPLATE = """\
{%- if tools %}{{ "[tools]" + (tools | tojson) }}{% endif %}
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant", "tool") %}
{{- raise_exception("no role is called " + message.role) }}
{%- endif %}
{{- "[" + message.role + "]" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{{- "<tool_call>" + ({"name": call.function.name, "arguments": call.function.arguments} | tojson) + "</tool_call>" }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% if enable_thinking %}{{ "<think>" }}{% endif %}{% endif %}"""
"""Beside the above it reads tools, their calls (in Hermes's format) and results, and `enable_thinking`."""


def write_tokenizer(folder: Path, chat_template: str | None = TINY_CHAT_TEMPLATE) -> None:
    """Bytes from "!" to "~" have the ids from 3 on, in order; bytes 0, 1 and 2 have none."""
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("ĀāĂ"))  # Bytes 0, 1 and 2.
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
