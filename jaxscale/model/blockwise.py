"""Exact attention in plain JAX, a block of queries at a time: the reference for every other implementation.

No pass, forward or backward, holds more than BLOCK x sequence scores of a head. The forward pass keeps its output and
each query's log-normaliser; the backward pass computes the scores again from them, as FlashAttention does
(arXiv 2205.14135, algorithms 1 and 4).

Inside this file queries are `[batch, kv_heads, group, sequence, head_dim]`, keys and values the same without `group`:
each head of keys serves a group of query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.precision import einsum_float32

BLOCK = 128
"""Queries whose scores exist at one time."""
BANDS = 16
"""Most parts into which the queries are cut, each of which computes only the keys that a causal mask allows it."""
MASKED = float(jnp.finfo(jnp.float32).min)
"""Score of a pair that must not attend; finite, so that a row of nothing but masked pairs gives no NaN."""


@partial(jax.tree_util.register_dataclass, data_fields=("segments", "lengths"), meta_fields=("causal",))
@dataclass(frozen=True)
class Mask:
    """Which keys a query may see.

    Attributes:
        causal: only those at its own position and before.
        segments: `[batch, sequence] int32`: only those with its own number (documents; -1 is padding). None: any.
        lengths: `[batch] int32`: only the first so many of the row (padding, where segments is None). None: any.
    """

    causal: bool
    segments: jax.Array | None = None
    lengths: jax.Array | None = None


def blockwise(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: Mask) -> jax.Array:
    """Softmax attention; shapes and scaling as in `attention.attention`."""
    segments = mask.segments
    if segments is None and mask.lengths is not None:
        real = jnp.arange(queries.shape[1])[None, :] < mask.lengths[:, None]
        segments = jnp.where(real, 0, -1)
    scaled = _grouped(queries / math.sqrt(queries.shape[-1]), keys.shape[2])
    return _ungrouped(_blockwise(scaled, _heads_first(keys), _heads_first(values), segments, mask.causal))


def whole(queries: jax.Array, keys: jax.Array, values: jax.Array, allowed: jax.Array) -> jax.Array:
    """The same for few queries at once, such as the next token's: `allowed` `[queries, keys]` says who sees whom."""
    scaled = _grouped(queries / math.sqrt(queries.shape[-1]), keys.shape[2])
    mixed, _ = _attend(scaled, _heads_first(keys), _heads_first(values), allowed)
    return _ungrouped(mixed.astype(queries.dtype))


class _Saved(NamedTuple):
    """What the backward pass needs."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    segments: jax.Array | None
    mixed: jax.Array
    normalisers: jax.Array
    """`[batch, kv_heads, group, sequence, 1] float32`: log of the sum of exponentials of each query's scores."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array | None, causal: bool
) -> jax.Array:
    return _forward(queries, keys, values, segments, causal)[0]


def _forward(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array | None, causal: bool
) -> tuple[jax.Array, _Saved]:
    outputs, normalisers = [], []
    for rows, seen in _bands(queries.shape[3], causal):
        block = partial(_attend_block, keys[:, :, :seen], values[:, :, :seen], segments, causal)
        (output, normaliser), _ = _each_block(block, rows, queries)
        outputs.append(output)
        normalisers.append(normaliser)
    mixed = jnp.concatenate(outputs, axis=3).astype(queries.dtype)
    return mixed, _Saved(queries, keys, values, segments, mixed, jnp.concatenate(normalisers, axis=3))


def _backward(causal: bool, saved: _Saved, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    queries, keys, values, segments, mixed, normalisers = saved
    # Row sums of probabilities x their gradients (FlashAttention, algorithm 4, line 4).
    sums = jnp.sum(gradient.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    d_queries = []
    d_keys, d_values = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    for rows, seen in _bands(queries.shape[3], causal):
        block = partial(_differentiate_block, keys[:, :, :seen], values[:, :, :seen], segments, causal)
        (d_query,), (d_key, d_value) = _each_block(block, rows, queries, normalisers, gradient, sums)
        d_queries.append(d_query)
        d_keys = d_keys.at[:, :, :seen].add(d_key)
        d_values = d_values.at[:, :, :seen].add(d_value)
    d_query = jnp.concatenate(d_queries, axis=3)
    return d_query.astype(queries.dtype), d_keys.astype(keys.dtype), d_values.astype(values.dtype), None


_blockwise.defvjp(_forward, _backward)

Parts = tuple[jax.Array, ...]


def _attend_block(
    keys: jax.Array, values: jax.Array, segments: jax.Array | None, causal: bool, start: Any, queries: jax.Array
) -> tuple[Parts, Parts]:
    """(output, log-normaliser) of the queries from `start` on; nothing to add up."""
    allowed = _allowed(start, queries.shape[3], keys.shape[2], segments, causal)
    return _attend(queries, keys, values, allowed), ()


def _differentiate_block(
    keys: jax.Array,
    values: jax.Array,
    segments: jax.Array | None,
    causal: bool,
    start: Any,
    queries: jax.Array,
    normalisers: jax.Array,
    gradient: jax.Array,
    sums: jax.Array,
) -> tuple[Parts, Parts]:
    """Gradient of the queries from `start` on; and what they add to the gradients of keys and values."""
    allowed = _allowed(start, queries.shape[3], keys.shape[2], segments, causal)
    scores = einsum_float32("bkgqd,bksd->bkgqs", queries, keys)
    weights = jnp.where(allowed, jnp.exp(scores - normalisers), 0)
    d_weights = einsum_float32("bkgqd,bksd->bkgqs", gradient, values)
    d_scores = (weights * (d_weights - sums)).astype(queries.dtype)
    d_queries = einsum_float32("bkgqs,bksd->bkgqd", d_scores, keys)
    d_keys = einsum_float32("bkgqs,bkgqd->bksd", d_scores, queries)
    d_values = einsum_float32("bkgqs,bkgqd->bksd", weights.astype(queries.dtype), gradient)
    return (d_queries,), (d_keys, d_values)


def _attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, allowed: jax.Array | bool
) -> tuple[jax.Array, jax.Array]:
    """Output and log-normaliser `[..., queries, 1]` of queries that see a part of the keys, both float32."""
    scores = jnp.where(allowed, einsum_float32("bkgqd,bksd->bkgqs", queries, keys), MASKED)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = einsum_float32("bkgqs,bksd->bkgqd", weights.astype(values.dtype), values) / total
    return mixed, largest + jnp.log(total)


def _allowed(start: Any, count: int, seen: int, segments: jax.Array | None, causal: bool) -> jax.Array | bool:
    """Which of the first `seen` keys each of `count` queries from `start` on may see; broadcasts to the scores."""
    allowed: jax.Array | bool = True
    if causal:
        allowed = jnp.arange(seen)[None, :] <= start + jnp.arange(count)[:, None]
    if segments is not None:
        own = jax.lax.dynamic_slice_in_dim(segments, start, count, axis=1)
        same = own[:, :, None] == segments[:, None, :seen]
        allowed = same[:, None, None] & allowed
    return allowed


def _bands(length: int, causal: bool) -> Iterator[tuple[range, int]]:
    """Cuts the queries into bands of whole blocks, and a rest: their indices, and the number of keys that they see."""
    blocks = length // BLOCK
    band = BLOCK * max(1, math.ceil(blocks / BANDS) if causal else blocks)
    starts = [*range(0, blocks * BLOCK, band), blocks * BLOCK, length]
    for start, stop in pairwise(starts):
        if stop > start:
            yield range(start, stop), stop if causal else length


def _each_block(block: Callable[..., tuple[Parts, Parts]], rows: range, *arrays: jax.Array) -> tuple[Parts, Parts]:
    """`block(start, *parts)` for each block of a band: its first results joined along the queries, its others added up.

    A band of one block is computed directly; more are a loop, so that only one block's scores exist at a time.
    """
    parts = [x[:, :, :, rows.start : rows.stop] for x in arrays]
    count = len(rows) // BLOCK
    if count <= 1:
        return block(rows.start, *parts)
    blocks = [jnp.moveaxis(x.reshape(*x.shape[:3], count, BLOCK, x.shape[4]), 3, 0) for x in parts]
    starts = rows.start + BLOCK * jnp.arange(count)
    sums = jax.eval_shape(block, starts[0], *(x[0] for x in blocks))[1]

    def add(totals: Parts, inputs: Parts) -> tuple[Parts, Parts]:
        results, terms = block(*inputs)
        return jax.tree.map(jnp.add, totals, terms), results

    zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in sums)
    totals, results = jax.lax.scan(add, zeros, (starts, *blocks))
    joined = tuple(jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], len(rows), x.shape[5]) for x in results)
    return joined, totals


def _heads_first(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


def _grouped(queries: jax.Array, kv_heads: int) -> jax.Array:
    """From `[batch, sequence, heads, head_dim]`."""
    batch, length, heads, head_dim = queries.shape
    return jnp.transpose(queries.reshape(batch, length, kv_heads, heads // kv_heads, head_dim), (0, 2, 3, 1, 4))


def _ungrouped(x: jax.Array) -> jax.Array:
    """Back to `[batch, sequence, heads, head_dim]`."""
    batch, kv_heads, group, length, head_dim = x.shape
    return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(batch, length, kv_heads * group, head_dim)
