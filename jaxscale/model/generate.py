"""Sampling from a decoder: the prompt at once, then a token at a time with a cache of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.model.attention import Cache
from jaxscale.model.transformer import Transformer


class Progress(NamedTuple):
    """The state of a generation before the token at `position`."""

    position: jax.Array
    tokens: jax.Array
    hidden: jax.Array
    """`[batch, 1, embed]`: of the last token."""
    cache: Cache
    ended: jax.Array
    """`[batch] bool`."""


def generate(
    model: Transformer,
    prompts: jax.Array,
    key: jax.Array,
    *,
    longest: int,
    vocabulary_size: int,
    temperature: jax.Array | float,
    top_p: jax.Array | float,
    end_id: jax.Array | int,
) -> jax.Array:
    """Continuations of prompts of one length.

    Args:
        model: a causal Transformer.
        prompts: `[batch, prompt] int32`.
        key: PRNG key; the same key gives the same text.
        longest: tokens of prompt and continuation together.
        vocabulary_size: tokens that may be chosen: those of the tokenizer, which may be fewer than the model's.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: see `sample`.
        end_id: a row ends at this token; what follows it is `end_id` too.

    Returns:
        `[batch, longest] int32`, prompts included.
    """
    start = begin(model, prompts, longest, end_id)
    return extend(
        model, start, key, longest, vocabulary_size=vocabulary_size, temperature=temperature, top_p=top_p, end_id=end_id
    ).tokens


def begin(model: Transformer, prompts: jax.Array, longest: int, end_id: jax.Array | int) -> Progress:
    """Prompts read, and room for `longest` tokens; arguments as for `generate`."""
    batch, length = prompts.shape
    tokens = jnp.full((batch, longest), end_id, jnp.int32).at[:, :length].set(prompts)
    hidden, cache = model.extend(prompts, model.empty_cache(batch, longest), 0)
    return Progress(jnp.asarray(length), tokens, hidden[:, -1:], cache, jnp.zeros(batch, bool))


def extend(
    model: Transformer,
    progress: Progress,
    key: jax.Array,
    until: jax.Array | int,
    *,
    vocabulary_size: int,
    temperature: jax.Array | float,
    top_p: jax.Array | float,
    end_id: jax.Array | int,
) -> Progress:
    """The generation gone on with up to `until` tokens, or until all rows have ended; arguments as for `generate`."""

    def unfinished(progress: Progress) -> jax.Array:
        return (progress.position < until) & ~jnp.all(progress.ended)

    def one_more(progress: Progress) -> Progress:
        position, tokens, hidden, cache, ended = progress
        logits = model.logits(hidden)[:, -1, :vocabulary_size]
        chosen = sample(logits, jax.random.fold_in(key, position), temperature, top_p)
        chosen = jnp.where(ended, end_id, chosen)
        tokens = jax.lax.dynamic_update_slice(tokens, chosen[:, None], (0, position))
        hidden, cache = model.extend(chosen[:, None], cache, position)
        return Progress(position + 1, tokens, hidden, cache, ended | (chosen == end_id))

    return jax.lax.while_loop(unfinished, one_more, progress)


def sample(logits: jax.Array, key: jax.Array, temperature: jax.Array | float, top_p: jax.Array | float) -> jax.Array:
    """A token a row from `[batch, vocabulary]` logits.

    Nucleus sampling (arXiv 1904.09751): of the likeliest tokens, the smallest set whose probabilities at `temperature`
    add up to at least `top_p`. Temperature 0 takes the likeliest token.
    """
    scaled = logits / jnp.maximum(temperature, 1e-6)
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    drawn = jax.random.categorical(key, jnp.where(scaled >= least, scaled, -jnp.inf), axis=-1)
    return jnp.where(temperature == 0, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
