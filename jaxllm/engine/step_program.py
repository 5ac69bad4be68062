"""The step program: one pure function from the packed step batch to what the step gives."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxllm.engine.device_state import DeviceState
from jaxllm.engine.kv_cache import KVCacheLayout
from jaxllm.engine.sampler import Logprobs, logprobs, sample
from jaxllm.layers.kv_caches import KVCaches
from jaxllm.layers.step_metadata import StepMetadata
from jaxllm.models.model import Model
from jaxllm.scheduler.batch_layout import BatchLayout


class StepResult(NamedTuple):
    """What a step gives for its rows, each kind by itself: the host copies those that some row wants. What is given for
    padding rows and unfinished prompts means nothing.

    sampled: int32 [1 + M, S], all of the `SampledTokens`, as they travel together: num_tokens, and then the M tokens.
    logprobs: zeros if no row wants them.
    """

    sampled: Array
    logprobs: Logprobs


Step = Callable[[list[Array], list[Array], DeviceState, Array], tuple[list[Array], DeviceState, StepResult]]


def make_step(model: Model, layout: BatchLayout, cache_layout: KVCacheLayout) -> Step:
    """The step function of the layout's bucket: (weights, kv_pages, state, packed) -> (kv_pages, state, result).

    kv_pages: the arrays of the cache layout, to be donated like the state. packed: the buffer of a `StepBatch`.
    """
    bucket = layout.bucket

    def step(
        weights: list[Array], kv_pages: list[Array], state: DeviceState, packed: Array
    ) -> tuple[list[Array], DeviceState, StepResult]:
        batch = layout.views(packed)
        rows_S, logits_rows_S = batch["rows"], batch["logits_rows"]

        from_device_S = jnp.where(batch["from_device"] == 1, logits_rows_S, bucket.num_tokens)  # Else out of range.
        token_ids_T = batch["token_ids"].at[from_device_S].set(state.last_token_ids[rows_S], mode="drop")
        metadata = StepMetadata(
            positions_T=batch["positions"],
            kv_lens_S=batch["kv_lens"],
            cu_q_lens=batch["cu_q_lens"],
            num_seqs=batch["num_seqs"],
            decode_only=bucket.is_decode_only,
            implementation=cache_layout.implementation,
        )
        module = model.bind(weights)
        caches = KVCaches(kv_pages, batch["page_table"], cache_layout.groups, cache_layout.page_size)
        hidden_TD = module(module.embed(token_ids_T), caches, metadata)
        logits_SV = module.logits(hidden_TD[logits_rows_S])

        sampling = {name: batch[name] for name in layout.sampling_names}
        token_ids_S, is_sound_S = sample(logits_SV, sampling, batch["positions"][logits_rows_S] + 1)
        result = StepResult(
            sampled=jnp.stack([is_sound_S.astype(jnp.int32), token_ids_S]),  # One token, or none.
            logprobs=logprobs(logits_SV, token_ids_S, sampling["wants_logprobs"] == 1),
        )
        state = state._replace(last_token_ids=state.last_token_ids.at[rows_S].set(token_ids_S))
        return caches.arrays, state, result

    return step
