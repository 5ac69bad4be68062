"""Which tokens of a step are real, and that feed-forward blocks are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.models import llama


@pytest.mark.parametrize(("cu_q_lens", "num_seqs", "num_tokens"), [([0, 1, 6, 6], 2, 6), ([0, 0, 0, 0], 0, 0)])
def test_tokens_after_those_of_the_last_sequence_are_padding(cu_q_lens, num_seqs, num_tokens):
    @jax.jit
    def real(cu_q_lens, num_seqs):
        metadata = StepMetadata(jnp.zeros(8, jnp.int32), jnp.zeros(3, jnp.int32), cu_q_lens, num_seqs, False, None)
        return metadata.num_tokens, metadata.is_real_T

    count, is_real_T = real(jnp.asarray(cu_q_lens, jnp.int32), jnp.asarray([num_seqs], jnp.int32))
    assert count == num_tokens
    assert is_real_T.tolist() == [True] * num_tokens + [False] * (8 - num_tokens)


class MLPOfTheMean(GatedMLP):
    """As experts do, each token depends on what else is in the step: here on the mean of its tokens."""

    def __call__(self, x_TD, metadata):
        sum_D = jnp.where(metadata.is_real_T[:, None], x_TD, 0).sum(0, keepdims=True)
        return super().__call__(x_TD + sum_D / metadata.num_tokens, metadata)


def test_a_block_that_looks_at_all_tokens_sees_no_padding(tiny_model, monkeypatch):
    plain = tiny_model("llama")
    monkeypatch.setattr(llama, "GatedMLP", MLPOfTheMean)
    model = type(plain)(plain.folder, "float32", max_model_len=128)
    prompt = list(range(3, 20))
    padded = model.prompt_logits(prompt, [len(prompt)])
    model._forward.T = len(prompt)
    np.testing.assert_allclose(padded, model.prompt_logits(prompt, [len(prompt)]), atol=1e-4)
    assert np.abs(padded - plain.prompt_logits(prompt, [len(prompt)])).max() > 0.1
