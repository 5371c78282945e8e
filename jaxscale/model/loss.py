"""Cross-entropy over a large vocabulary, without ever holding all logits.

A chunk of positions at a time: its logits, their log-normaliser, the loss, and at once the gradients with respect to
the hidden states and the output matrix. Doing the gradient in the forward pass saves computing the logits a second
time; the backward pass only scales it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.parallel.sharding import constrain, over_rows
from jaxscale.precision import einsum_float32


class LossSums(NamedTuple):
    """Sums over the positions of a batch, each a float32 scalar; only `total` carries a gradient."""

    total: jax.Array
    """cross_entropy + z_weight x z: what is minimised."""
    cross_entropy: jax.Array
    """Sum of weight x -log p(target), in nats."""
    z: jax.Array
    """Sum of weight x squared log-normaliser (PaLM, arXiv 2204.02311, section 5)."""


class Output(NamedTuple):
    """The output matrix `[padded vocabulary, embed]` in the compute dtype, and a float32 bias `[padded vocabulary]`."""

    table: jax.Array
    bias: jax.Array | None


def cross_entropy(
    hidden: jax.Array,
    output: Output,
    targets: jax.Array,
    weights: jax.Array,
    *,
    vocabulary_size: int,
    z_weight: float,
    chunk: int,
) -> LossSums:
    """Weighted sums of the losses of a batch.

    Args:
        hidden: `[batch, sequence, embed]` in the compute dtype.
        output: what turns hidden states into logits; rows from `vocabulary_size` on are padding, outside the softmax.
        targets: `[batch, sequence] int32`.
        weights: `[batch, sequence] float32`, 0 where nothing is to be predicted.
        z_weight: weight of the z-loss in the total.
        chunk: positions of each row whose logits exist at one time.
    """
    return LossSums(*_cross_entropy(hidden, output, targets, weights, (vocabulary_size, z_weight, chunk)))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(hidden, output, targets, weights, static):
    rows = (hidden, targets, weights)
    _, sums = over_rows(lambda rows, output: (None, _sums(rows, output, static)), rows, output)
    return sums


def _forward(hidden, output, targets, weights, static):
    rows = (hidden, targets, weights)
    d_hidden, (sums, d_output) = over_rows(lambda rows, output: _gradients(rows, output, static), rows, output)
    return sums, (d_hidden, jax.tree.map(lambda d, x: d.astype(x.dtype), d_output, output))


def _backward(static, saved, gradients):
    d_hidden, d_output = jax.tree.map(lambda d: (gradients[0] * d).astype(d.dtype), saved)
    return d_hidden, d_output, None, None


_cross_entropy.defvjp(_forward, _backward)


def _sums(rows, output, static):
    """The three sums over the rows of a data shard."""

    def add(sums, chunk):
        return jax.tree.map(jnp.add, sums, _losses(chunk, output, static)[0]), None

    return _over_chunks(add, _zeros(), rows, static[2])[0]


def _gradients(rows, output, static):
    """Gradient for the hidden states; the three sums and the gradient for the output, for the rows of a data shard."""
    _, z_weight, chunk_size = static

    def add(carry, chunk):
        sums, d_output = carry
        hidden, targets, weights = chunk
        new_sums, logits, normaliser = _losses(chunk, output, static)
        probabilities = jnp.exp(logits - normaliser)
        hit = jnp.arange(logits.shape[-1]) == targets[..., None]
        d_logits = weights[..., None] * (probabilities * (1 + 2 * z_weight * normaliser) - hit)
        narrow = d_logits.astype(hidden.dtype)
        d_hidden = einsum_float32("bsv,ve->bse", narrow, output.table).astype(hidden.dtype)
        d_table = d_output.table + einsum_float32("bsv,bse->ve", narrow, hidden)
        d_bias = None if output.bias is None else d_output.bias + jnp.sum(d_logits, axis=(0, 1))
        return (jax.tree.map(jnp.add, sums, new_sums), Output(d_table, d_bias)), d_hidden

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), output)
    carry, d_hidden = _over_chunks(add, (_zeros(), zeros), rows, chunk_size)
    return d_hidden, carry


def _losses(chunk, output, static):
    """The three sums over one chunk, its logits `[batch, chunk, padded vocabulary] float32` and their log-normaliser."""
    hidden, targets, weights = chunk
    vocabulary_size, z_weight, _ = static
    logits = einsum_float32("bse,ve->bsv", hidden, output.table)
    if output.bias is not None:
        logits = logits + output.bias
    index = jnp.arange(logits.shape[-1])
    if vocabulary_size < logits.shape[-1]:
        logits = jnp.where(index < vocabulary_size, logits, jnp.finfo(jnp.float32).min)
    logits = constrain(logits, "local_batch", "chunk", "vocabulary")
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # A sum over the vocabulary instead of an indexed read: it stays local where the vocabulary is sharded.
    target_logits = jnp.sum(jnp.where(index == targets[..., None], logits, 0), axis=-1)
    loss = jnp.sum(weights * (normaliser[..., 0] - target_logits))
    z = jnp.sum(weights * jnp.square(normaliser[..., 0]))
    return (loss + z_weight * z, loss, z), logits, normaliser


def _over_chunks(function, carry, rows, size):
    """`function(carry, chunk) -> (carry, result)` over chunks of positions; results joined along the sequence."""
    length = rows[0].shape[1]
    size = min(size, length)
    whole = length - length % size
    chunks = jax.tree.map(
        lambda x: jnp.moveaxis(x[:, :whole].reshape(x.shape[0], whole // size, size, *x.shape[2:]), 1, 0), rows
    )
    carry, results = jax.lax.scan(function, carry, chunks)
    joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], whole, *x.shape[3:]), results)
    if whole == length:
        return carry, joined
    carry, rest = function(carry, jax.tree.map(lambda x: x[:, whole:], rows))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), joined, rest)


def _zeros():
    zero = jnp.zeros((), jnp.float32)
    return (zero, zero, zero)

