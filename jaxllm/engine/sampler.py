"""Choosing the next token of each sequence, on the device, inside the step program.

The filters and their order are vLLM's: temperature, then min_p, top_k and top_p, each on what the one before
left.

They work on a token's *distance* below its row's best token, ``(max - logit) / temperature``: zero for the
best, infinite for an excluded token. Distances are not negative, and such floats sort as their bit patterns
do, so the exact cut of a filter is found bit by bit. Nothing sorts the vocabulary: a sort is slow on TPU and
CPU, and would gather a vocabulary that is sharded over the mesh.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

NUM_TOP_LOGPROBS = 20
"""So many of the most likely tokens come with log-probabilities, of which a request shows what it asked for."""

_INFINITY_BITS = 0x7F800000  # of a float32; greater patterns are NaN


SamplingArrays = Mapping[str, jax.Array]
"""The settings of a step's rows, each [S], by the names in `SamplingRow`. A temperature is 0 or at least 1e-5."""


class Sampled(NamedTuple):
    """What was chosen for a step's rows, each [S]."""

    token_ids: jax.Array  # int32, in the vocabulary whatever the logits are
    is_sound: jax.Array  # bool; false where a logit is NaN or +inf, or all are -inf, so that the token means nothing


def sample(logits_SV: jax.Array, params: SamplingArrays, positions_S: jax.Array) -> Sampled:
    """Returns one token for each row.

    ``logits_SV`` is float32; ``positions_S`` (int32) is the index in its sequence of the token to be sampled.
    A random row's token depends on its own logits, settings, seed and position alone: not on the other rows,
    the row's number, or the padding of S. Equal logits at a filter's cut are all kept. A greedy row takes the
    first of its best tokens.
    """
    greedy_S = params["temperature"] == 0.0
    # NaN counts as infinite, since XLA's reductions may pass over it.
    max_S1 = jnp.max(jnp.where(jnp.isnan(logits_SV), jnp.inf, logits_SV), axis=1, keepdims=True)

    def some_random() -> jax.Array:
        noise_SV = _gumbel(_random_bits(params["seed"], positions_S, logits_SV.shape[1]))
        scores_SV = noise_SV - truncate(logits_SV, max_S1, params)
        scores_SV = jnp.where(greedy_S[:, None], logits_SV, scores_SV)
        return _first(scores_SV, jnp.max(scores_SV, axis=1, keepdims=True))

    token_ids_S = lax.cond(jnp.all(greedy_S), lambda: _first(logits_SV, max_S1), some_random)
    return Sampled(token_ids_S, jnp.isfinite(max_S1[:, 0]))


class Logprobs(NamedTuple):
    """Log-probabilities of a step's rows by the model's own logits, before temperature and filters."""

    sampled: jax.Array  # float32 [S], of the token that was sampled
    top_token_ids: jax.Array  # int32 [S, NUM_TOP_LOGPROBS], the most likely ones, best first; the lower id if equal
    top: jax.Array  # float32 [S, NUM_TOP_LOGPROBS]


def logprobs(logits_SV: jax.Array, sampled_S: jax.Array, is_wanted_S: jax.Array) -> Logprobs:
    """Returns those of all rows if any row wants them, else zeros, at no cost. ``logits_SV`` is float32."""
    num_seqs, vocab_size = logits_SV.shape
    num_top = min(NUM_TOP_LOGPROBS, vocab_size)

    def compute() -> Logprobs:
        log_sum_S = jax.nn.logsumexp(logits_SV, axis=1)
        is_sampled_SV = lax.broadcasted_iota(jnp.int32, logits_SV.shape, 1) == sampled_S[:, None]
        of_sampled_S = jnp.sum(jnp.where(is_sampled_SV, logits_SV, 0.0), axis=1)
        top_token_ids_SK, top_SK = _top(logits_SV, num_top)
        return Logprobs(of_sampled_S - log_sum_S, top_token_ids_SK, top_SK - log_sum_S[:, None])

    def skip() -> Logprobs:
        return Logprobs(
            jnp.zeros(num_seqs, jnp.float32),
            jnp.zeros((num_seqs, num_top), jnp.int32),
            jnp.zeros((num_seqs, num_top), jnp.float32),
        )

    return lax.cond(jnp.any(is_wanted_S), compute, skip)


def truncate(logits_SV: jax.Array, max_S1: jax.Array, params: SamplingArrays) -> jax.Array:
    """Returns each token's distance, float32 [S, V], infinite where its row's filters exclude the token.

    ``max_S1`` holds the rows' greatest logits. A random row samples from the softmax of its negated distances. A
    greedy row's mean nothing.
    """
    random_S = params["temperature"] > 0.0
    temperature_S = jnp.where(random_S, params["temperature"], 1.0)
    distances_SV = (max_S1 - logits_SV) / temperature_S[:, None]  # NaN if all are -inf: within no radius

    # A probability of at least min_p times the greatest one.
    distances_SV = _within(distances_SV, -jnp.log(params["min_p"]))
    top_k_S = jnp.where(random_S & (params["top_k"] > 0), params["top_k"].astype(jnp.float32), jnp.inf)
    distances_SV = _nearest(distances_SV, jnp.ones_like, top_k_S)
    top_p_S = jnp.where(random_S & (params["top_p"] < 1.0), params["top_p"], jnp.inf)
    return _nearest(distances_SV, _probabilities, top_p_S)


def _probabilities(distances_SV: jax.Array) -> jax.Array:
    return jax.nn.softmax(-distances_SV, axis=1)


def _nearest(distances_SV: jax.Array, weigh: Callable[[jax.Array], jax.Array], target_S: jax.Array) -> jax.Array:
    """Keeps a row's nearest tokens, as few as reach the target weight; all where the target is infinite."""

    def cut() -> jax.Array:
        return _within(distances_SV, _radius(distances_SV, weigh(distances_SV), target_S))

    return lax.cond(jnp.any(target_S < jnp.inf), cut, lambda: distances_SV)


def _within(distances_SV: jax.Array, radius_S: jax.Array) -> jax.Array:
    return jnp.where(distances_SV <= radius_S[:, None], distances_SV, jnp.inf)


def _radius(distances_SV: jax.Array, weights_SV: jax.Array, target_S: jax.Array) -> jax.Array:
    """Returns the least radius, float32 [S], within which the weights reach the target; else infinity.

    It is also the greatest float for which the weights nearer than it fall short. From the highest, each of
    its 31 bits is set if the float so far still has that property: 31 passes of compare and add over [S, V].
    """
    bits_SV = lax.bitcast_convert_type(distances_SV, jnp.int32)

    def try_bit(step: jax.Array, radius_S: jax.Array) -> jax.Array:
        candidate_S = radius_S | (jnp.int32(1 << 30) >> step)
        nearer_SV = bits_SV < candidate_S[:, None]
        short_S = jnp.sum(jnp.where(nearer_SV, weights_SV, 0.0), axis=1) < target_S
        return jnp.where(short_S, candidate_S, radius_S)

    radius_S = lax.fori_loop(0, 31, try_bit, jnp.zeros_like(target_S, jnp.int32))
    return lax.bitcast_convert_type(jnp.minimum(radius_S, _INFINITY_BITS), jnp.float32)


def _random_bits(seed_S: jax.Array, positions_S: jax.Array, vocab_size: int) -> jax.Array:
    """Returns random bits, uint32 [S, V], that are a function of seed, position and token id alone.

    So there is no state to keep, a preempted request repeats its tokens, and each shard of the vocabulary
    draws its own part. Threefry's price is about a hundred integer operations for a token of the vocabulary,
    little beside the 2 D operations that made its logit, and due only in steps that have a random row.
    """

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    return jax.vmap(draw)(seed_S, positions_S)


def _gumbel(bits: jax.Array) -> jax.Array:
    """Returns Gumbel noise, float32, for random uint32: logits plus noise have their argmax at a sample.

    All 32 bits count. ``jax.random.gumbel`` uses 23 and ends at 15.9, so that tokens 1e-7 times as likely as
    the best are hardly ever drawn; its ``mode="high"`` draws twice the bits. This noise reaches 22.9.
    """
    # Floats are fine near 0 and coarse near 1, so the small ones become the long tail; 1 itself is avoided.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _top(logits_SV: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ids and logits, each [S, num_top], of each row's best tokens, best first; the lower id if equal.

    Of a vocabulary that is sharded over the mesh, each device finds its own best, and only these are gathered.
    """
    num_shards = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    if num_shards == 1:
        top_SK, token_ids_SK = _top_k(logits_SV, num_top)
        return token_ids_SK, top_SK
    shard_size = logits_SV.shape[1] // num_shards

    def find(logits_SV: jax.Array) -> tuple[jax.Array, jax.Array]:
        top_SK, token_ids_SK = _top_k(logits_SV, min(num_top, shard_size))
        token_ids_SK += lax.axis_index("model") * shard_size
        # One shard after the other, so that of equal candidates the lower id comes first.
        candidates_SC = lax.all_gather(top_SK, "model", axis=1, tiled=True)
        token_ids_SC = lax.all_gather(token_ids_SK, "model", axis=1, tiled=True)
        top_SK, places_SK = lax.top_k(candidates_SC, num_top)
        return jnp.take_along_axis(token_ids_SC, places_SK, axis=1), top_SK

    whole = PartitionSpec()
    return jax.shard_map(find, in_specs=PartitionSpec(None, "model"), out_specs=(whole, whole), check_vma=False)(
        logits_SV
    )


def _top_k(logits_SV: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Returns what `lax.top_k` returns. For that XLA on GPU sorts the whole rows."""
    return lax.platform_dependent(
        logits_SV,
        cuda=lambda logits_SV: _top_k_by_parts(logits_SV, num_top),
        default=lambda logits_SV: tuple(lax.top_k(logits_SV, num_top)),
    )


def _top_k_by_parts(logits_SV: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Returns what `lax.top_k` returns, with sorts of parts' greatest logits and of a few parts only.

    The best tokens lie in the `num_top` parts with the greatest maxima, the earlier part if equal: each other part is
    behind so many tokens that are better than all of its own, or as good with a lower id.
    """
    num_seqs, vocab_size = logits_SV.shape
    part_size = math.gcd(vocab_size, 128)
    logits_SPC = logits_SV.reshape(num_seqs, -1, part_size)
    _, parts_SK = lax.top_k(logits_SPC.max(axis=2), min(num_top, logits_SPC.shape[1]))
    parts_SK = jnp.sort(parts_SK, axis=1)  # So that of equal candidates the lower id comes first.
    candidates_SKC = jnp.take_along_axis(logits_SPC, parts_SK[:, :, None], axis=1)
    top_SK, places_SK = lax.top_k(candidates_SKC.reshape(num_seqs, -1), num_top)
    return top_SK, jnp.take_along_axis(parts_SK, places_SK // part_size, axis=1) * part_size + places_SK % part_size


def _first(scores_SV: jax.Array, max_S1: jax.Array) -> jax.Array:
    """Returns the index of the first of each row's greatest scores, int32 [S]; a real token id even for NaN.

    A plain reduction after that of the maximum, because XLA's argmax (one reduction of pairs) is scalar code on CPU: 8
    times slower.
    """
    last_token_id = scores_SV.shape[1] - 1
    token_ids_SV = lax.broadcasted_iota(jnp.int32, scores_SV.shape, 1)
    return jnp.min(jnp.where(scores_SV == max_S1, token_ids_SV, last_token_id), axis=1)
