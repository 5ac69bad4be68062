"""A real model from its GGUF file against transformers on torch (`tests/data/make_goldens.py`), in float32."""

import json
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from scipy.special import logsumexp

from jaxllm import SamplingParams

DATA = Path(__file__).parents[2] / "data"
GOLDENS = json.loads((DATA / "smollm2_goldens.json").read_text())["prompts"]
LOGIT_TOLERANCE = 5e-4  # The largest logit is 35; float32 in another order of summation gives 8e-5.


@pytest.mark.parametrize("max_prompt_len", [400, pytest.param(1400, marks=pytest.mark.nightly)])
def test_the_greedy_continuations_are_those_of_transformers(demo_llm, max_prompt_len):
    """All in one call: 8 rows, long prompts in chunks of what is left of 128 tokens a step."""
    goldens = [golden for golden in GOLDENS if len(golden["prompt_token_ids"]) <= max_prompt_len]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = demo_llm.generate([golden["text"] for golden in goldens], params)
    for golden, output in zip(goldens, outputs, strict=True):
        [completion] = output.outputs
        assert output.prompt_token_ids == golden["prompt_token_ids"], golden["name"]
        assert completion.token_ids == golden["token_ids"], golden["name"]
        assert completion.text == golden["output_text"], golden["name"]


def test_a_stream_gives_the_same_text(demo_llm):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for golden in GOLDENS[3:4]:  # Chinese, of which a token may be part of a character.
        text = "".join(demo_llm.stream(golden["text"], params)).rstrip("\ufffd")
        assert text
        assert golden["output_text"].startswith(text)


def test_the_end_token_ends_the_answer(demo_llm):
    ending = [golden for golden in GOLDENS if 2 in golden["token_ids"] and len(golden["text"]) < 1000]
    assert ending
    params = SamplingParams(temperature=0, max_tokens=64)
    outputs = demo_llm.generate([golden["text"] for golden in ending], params)
    for golden, output in zip(ending, outputs, strict=True):
        assert output.outputs[0].token_ids == golden["token_ids"][: golden["token_ids"].index(2) + 1]
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.nightly
def test_the_logits_are_those_of_transformers_at_every_position(demo_llm, make_forward):
    runner = demo_llm.engine.runner
    forward = make_forward(runner._model, runner._mesh, max_len=1408)
    prompts = {golden["name"]: golden["prompt_token_ids"] for golden in GOLDENS}
    with np.load(DATA / "smollm2_logits.npz") as expected:
        for i, name in enumerate(expected["names"].tolist()):
            ids, rows = prompts[name], expected["positions"][i]
            chunk_lens = [min(64, len(ids) - start) for start in range(0, len(ids), 64)]
            logits = forward(runner._weights, ids, chunk_lens)[rows]
            top = np.take_along_axis(logits, expected["top_ids"][i], axis=1)
            np.testing.assert_allclose(top, expected["top_logits"][i], atol=LOGIT_TOLERANCE, rtol=0)
            total = logsumexp(logits, axis=1)
            np.testing.assert_allclose(total, expected["logsumexp"][i], atol=LOGIT_TOLERANCE, rtol=0)


# Its programs


def test_the_cache_is_updated_in_place(demo_llm):
    runner = demo_llm.engine.runner
    cache_bytes = runner.num_pages * runner._layout.page_bytes()
    assert len(runner._programs) == len(runner.buckets)
    for program in runner._programs.values():
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes


def test_no_step_copies_a_cache_or_a_weight(demo_llm):
    """No operation of the compiled programs moves or converts as many elements as a cache or a matrix has."""
    runner = demo_llm.engine.runner
    matrices = [struct.shape for struct in runner._model.structs if len(struct.shape) > 1]
    sizes = {prod(shape) for shape in [*matrices, runner._kv_pages[0].shape]}
    moved = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|transpose|convert|reverse|pad|concatenate)\(")
    for bucket, program in runner._programs.items():
        found = moved.findall(program.as_text())
        assert found, "the pattern does not fit XLA's text any more"
        large = [f"{op} [{dims}]" for dims, op in found if prod(map(int, dims.split(","))) in sizes]
        assert not large, bucket
