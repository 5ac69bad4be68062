"""Writes a GGUF file as a folder of bfloat16 safetensors with its tokenizer, for the peers that cannot read GGUF.

Runs in a peer's environment: needs torch, transformers, accelerate and gguf. Usage: convert_gguf.py FILE.gguf FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
