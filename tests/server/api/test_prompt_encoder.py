"""Texts and conversations as token ids, with and without the tokens that a tokenizer adds of its own."""

import asyncio
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from jaxllm.server.api.prompts.prompt_encoder import PromptEncoder


@pytest.mark.parametrize(("single", "before", "after"), [("<s> $A", [1], []), ("<s> $A </s>", [1], [2])])
def test_special_tokens_are_added_to_texts_by_default_and_to_conversations_on_demand(
    stub_folder, single, before, after
):
    tokenizer = AutoTokenizer.from_pretrained(stub_folder)
    post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = post_processor
    encoder = PromptEncoder(SimpleNamespace(tokenizer=tokenizer, info=SimpleNamespace(max_model_len=100)))
    plain = [ord(character) - 30 for character in "ab"]

    async def check() -> None:
        assert await encoder.encode("ab") == [*before, *plain, *after]
        assert await encoder.encode("ab", add_special_tokens=False) == plain
        assert await encoder.encode_parts(["ab"], name="it") == plain
        assert await encoder.encode_parts(["ab"], name="it", add_special_tokens=True) == [*before, *plain, *after]

    try:
        asyncio.run(check())
    finally:
        encoder.close()
