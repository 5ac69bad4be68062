"""Makes the goldens of this folder: what transformers on torch computes, for the tests to compare with.

    pip install torch transformers gguf accelerate safetensors ml_dtypes        (in an environment of its own)
    python tests/data/make_goldens.py tiny
    python tests/data/make_goldens.py smollm2 tokenizer --gguf SmolLM2-135M-Instruct.Q4_1.gguf

It takes some three minutes, on one CPU thread, with eager attention. Each token of a greedy continuation has
a margin, the distance of the two highest logits. Prompts are chosen so that no margin comes near the noise of
float32 (3e-5 on the tiny models; 1e-4 on SmolLM2, against float64): correct float32 engines give the same
tokens. What the files hold is told by the docstrings of `make_tiny`, `make_smollm2` and `make_tokenizer`.
"""

import argparse
import json
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from golden_texts import CHAT_PROMPTS, CHATS, LOGIT_PROMPTS, TEXT_PROMPTS, TOKENIZER_TEXTS
from tiny_models import TINY_MODELS, write_tiny_model

DATA = Path(__file__).parent
TINY_PROMPT_LENS = (1, 7, 23, 60)
TINY_NEW_TOKENS, TINY_MIN_MARGIN, TINY_MIN_DISTINCT = 24, 0.02, 6
NEW_TOKENS, MIN_MARGIN = 64, 5e-3
TOP, NUM_POSITIONS = 32, 8


def load(folder: Path, dtype: torch.dtype, **kwargs: Any) -> transformers.PreTrainedModel:
    """A model that never stops at EOS."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", **kwargs
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt_logits(model: transformers.PreTrainedModel, prompt_ids: list[int]) -> np.ndarray:
    """Logits of every prompt position, float32 [prompt, V]."""
    with torch.no_grad():
        return model(torch.tensor([prompt_ids]), use_cache=False).logits[0].float().numpy()


def continue_greedily(
    model: transformers.PreTrainedModel, prompt_ids: list[int], num_tokens: int
) -> tuple[list[int], np.ndarray]:
    """The next `num_tokens` token ids, and their margins, float32 [num_tokens]."""
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top_two = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt_ids) :].tolist(), (top_two[:, 0] - top_two[:, 1]).numpy()


def make_tiny() -> None:
    """tiny_goldens/<name>.npz, for four prompts of random ids: prompt_lens [4]; prompt_ids [91], one prompt
    after another; logits [91, V] at every prompt position; last_logits_bf16 [4, V] (float32) of a run in
    bfloat16; greedy_ids and greedy_margins [4, 24].

    The model is loaded anew for each call, because dynamic RoPE leaves a state behind in the module.
    """
    (DATA / "tiny_goldens").mkdir(exist_ok=True)
    for name, config in TINY_MODELS.items():
        vocab_size = config.get("text_config", config)["vocab_size"]
        prompts, logits, last_logits_bf16, greedy_ids, greedy_margins = [], [], [], [], []
        with TemporaryDirectory() as temporary:
            folder = write_tiny_model(name, Path(temporary))
            for prompt_len in TINY_PROMPT_LENS:
                for seed in count():  # until the continuation is neither near a tie nor dull
                    random = np.random.RandomState([prompt_len, seed])
                    prompt = random.randint(vocab_size, size=prompt_len).tolist()
                    ids, margins = continue_greedily(load(folder, torch.float32), prompt, TINY_NEW_TOKENS)
                    if margins.min() >= TINY_MIN_MARGIN and len(set(ids)) >= TINY_MIN_DISTINCT:
                        break
                prompts.append(prompt)
                greedy_ids.append(ids)
                greedy_margins.append(margins)
                logits.append(prompt_logits(load(folder, torch.float32), prompt))
                last_logits_bf16.append(prompt_logits(load(folder, torch.bfloat16), prompt)[-1])
        np.savez_compressed(
            DATA / "tiny_goldens" / f"{name}.npz",
            prompt_lens=np.array(TINY_PROMPT_LENS, np.int32),
            prompt_ids=np.concatenate(prompts).astype(np.int32),
            logits=np.concatenate(logits),
            last_logits_bf16=np.stack(last_logits_bf16),
            greedy_ids=np.array(greedy_ids, np.int32),
            greedy_margins=np.stack(greedy_margins),
        )
        print(f"{name}: smallest margin {np.min(greedy_margins):.3f}")


def read_tokenizer(gguf_path: Path) -> transformers.PreTrainedTokenizerFast:
    """SmolLM2's tokenizer from the vocabulary and merges in the GGUF file.

    Built here because transformers gives every GGUF file of the kind "gpt2" the pre-tokenizer of GPT-2, and
    SmolLM2's own (tokenizer.json of the original repository) splits digits one by one first.
    """
    fields = gguf.GGUFReader(gguf_path).fields
    tokens, merges, token_types = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")
    )
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=True)
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == gguf.TokenType.CONTROL
        ]
    )
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"].contents(),
        clean_up_tokenization_spaces=False,
        **special,
    )


def make_smollm2(gguf_path: Path) -> None:
    """smollm2_goldens.json: for each prompt its text (a chat's after the template) and prompt_token_ids; the
    token_ids of 64 greedy tokens, EOS ignored, their margins, and output_text, special tokens skipped.

    smollm2_logits.npz, for the prompts `names` [6]: positions [6, 8] in the prompt, the last one included;
    top_ids and top_logits [6, 8, 32] of the highest logits there, highest first; logsumexp [6, 8] of all.
    """
    tokenizer = read_tokenizer(gguf_path)
    model = load(gguf_path.parent, torch.float32, gguf_file=gguf_path.name)
    chat_texts = {name: apply_template(tokenizer, chat, tokenize=False) for name, chat in CHAT_PROMPTS.items()}
    goldens = []
    for name, text in (TEXT_PROMPTS | chat_texts).items():
        prompt_ids = tokenizer.encode(text)
        ids, margins = continue_greedily(model, prompt_ids, NEW_TOKENS)
        golden = {
            "name": name,
            "text": text,
            "prompt_token_ids": prompt_ids,
            "token_ids": ids,
            "margins": [round(float(margin), 4) for margin in margins],
            "output_text": tokenizer.decode(ids, skip_special_tokens=True),
        }
        goldens.append(golden)
        margin = margins.min()
        print(f"{name}: {len(prompt_ids)} tokens, smallest margin {margin:.4f}: {golden['output_text']!r}")
        if margin < MIN_MARGIN:
            raise SystemExit(f"{name!r} comes within {margin:.1e} of a tie (limit {MIN_MARGIN}): reword it")
    write_json_lines(DATA / "smollm2_goldens.json", {"prompts": goldens})

    ids_by_name = {golden["name"]: golden["prompt_token_ids"] for golden in goldens}
    positions = np.stack(
        [np.linspace(0, len(ids_by_name[name]) - 1, NUM_POSITIONS).round() for name in LOGIT_PROMPTS]
    ).astype(np.int32)
    logits = torch.stack(
        [
            torch.from_numpy(prompt_logits(model, ids_by_name[name])[rows])
            for name, rows in zip(LOGIT_PROMPTS, positions, strict=True)
        ]
    )
    top = logits.topk(TOP)
    np.savez_compressed(
        DATA / "smollm2_logits.npz",
        names=np.array(LOGIT_PROMPTS),
        positions=positions,
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        logsumexp=logits.logsumexp(-1).numpy(),
    )


def make_tokenizer(gguf_path: Path) -> None:
    """smollm2_tokenizer.json: texts with their ids and what these decode to, special tokens included; chats
    with the text and the ids that the template gives, a generation prompt at the end."""
    tokenizer = read_tokenizer(gguf_path)
    texts = []
    for text in TOKENIZER_TEXTS:
        ids = tokenizer.encode(text)
        texts.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
    chats = [
        {
            "messages": chat,
            "text": apply_template(tokenizer, chat, tokenize=False),
            "ids": apply_template(tokenizer, chat, tokenize=True, return_dict=False),
        }
        for chat in CHATS
    ]
    write_json_lines(DATA / "smollm2_tokenizer.json", {"texts": texts, "chats": chats})
    print(f"{len(texts)} texts, {len(chats)} chats")


def apply_template(tokenizer: transformers.PreTrainedTokenizerFast, chat: Any, **kwargs: Any) -> Any:
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, **kwargs)


def write_json_lines(path: Path, lists: dict[str, list[Any]]) -> None:
    """Writes a JSON object of lists, a line for each element, so that a diff shows which one changed."""
    parts = [
        f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(element) for element in elements) + "\n]"
        for key, elements in lists.items()
    ]
    path.write_text("{" + ",\n".join(parts) + "}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the goldens that the tests compare with.")
    parser.add_argument("which", nargs="+", choices=("tiny", "smollm2", "tokenizer"))
    parser.add_argument("--gguf", type=Path, help="the demo model, for smollm2 and tokenizer")
    arguments = parser.parse_args()
    if arguments.gguf is None and set(arguments.which) != {"tiny"}:
        parser.error("smollm2 and tokenizer need --gguf FILE")
    torch.set_num_threads(1)
    if "tiny" in arguments.which:
        make_tiny()
    if "tokenizer" in arguments.which:
        make_tokenizer(arguments.gguf)
    if "smollm2" in arguments.which:
        make_smollm2(arguments.gguf)


if __name__ == "__main__":
    main()
