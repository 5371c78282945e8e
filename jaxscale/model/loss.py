"""Cross-entropy over a large vocabulary, without ever holding all logits.

A chunk of positions at a time: its logits, their log-normaliser, the loss, and at once the gradients with respect to
the hidden states and the output matrix. Doing the gradient in the forward pass saves computing the logits a second
time; the backward pass only scales it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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


class Rows(NamedTuple):
    """A data shard's rows, or a chunk of their positions."""

    hidden: jax.Array
    targets: jax.Array
    weights: jax.Array


class Settings(NamedTuple):
    """What does not change from batch to batch."""

    vocabulary_size: int
    z_weight: float
    chunk: int


Sums = tuple[jax.Array, jax.Array, jax.Array]


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
    rows = Rows(hidden, targets, weights)
    return LossSums(*_cross_entropy(rows, output, Settings(vocabulary_size, z_weight, chunk)))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(rows: Rows, output: Output, settings: Settings) -> Sums:
    return over_rows(lambda rows, output: (None, _sums(rows, output, settings)), rows, output)[1]


def _forward(rows: Rows, output: Output, settings: Settings) -> tuple[Sums, tuple[jax.Array, Output]]:
    d_hidden, (sums, d_output) = over_rows(lambda rows, output: _gradients(rows, output, settings), rows, output)
    return sums, (d_hidden, d_output)


def _backward(settings: Settings, saved: tuple[jax.Array, Output], gradients: Sums) -> tuple[Rows, Output]:
    d_hidden, d_output = jax.tree.map(lambda d: (gradients[0] * d).astype(d.dtype), saved)
    return Rows(d_hidden, None, None), d_output  # type: ignore[arg-type]  # JAX's sign for no gradient


_cross_entropy.defvjp(_forward, _backward)


def _sums(rows: Rows, output: Output, settings: Settings) -> Sums:
    """The three sums over the rows of a data shard."""

    def add(sums: Sums, chunk: Rows) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, _losses(chunk, output, settings)[0]), None

    return _over_chunks(add, _zeros(), rows, settings.chunk)[0]


def _gradients(rows: Rows, output: Output, settings: Settings) -> tuple[jax.Array, tuple[Sums, Output]]:
    """Gradient for the hidden states; the three sums and the gradient for the output, for the rows of a data shard."""

    def add(carry: tuple[Sums, Output], chunk: Rows) -> tuple[tuple[Sums, Output], jax.Array]:
        sums, d_output = carry
        new_sums, logits, normaliser = _losses(chunk, output, settings)
        probabilities = jnp.exp(logits - normaliser)
        hit = jnp.arange(logits.shape[-1]) == chunk.targets[..., None]
        d_logits = chunk.weights[..., None] * (probabilities * (1 + 2 * settings.z_weight * normaliser) - hit)
        narrow = d_logits.astype(chunk.hidden.dtype)
        d_hidden = einsum_float32("bsv,ve->bse", narrow, output.table).astype(chunk.hidden.dtype)
        d_table = d_output.table + einsum_float32("bsv,bse->ve", narrow, chunk.hidden)
        d_bias = None if d_output.bias is None else d_output.bias + jnp.sum(d_logits, axis=(0, 1))
        return (jax.tree.map(jnp.add, sums, new_sums), Output(d_table, d_bias)), d_hidden

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), output)
    (sums, d_output), d_hidden = _over_chunks(add, (_zeros(), zeros), rows, settings.chunk)
    # Cast before the shards' gradients are added up, as those of all other parameters: half the bytes travel.
    return d_hidden, (sums, jax.tree.map(lambda d, x: d.astype(x.dtype), d_output, output))


def _losses(chunk: Rows, output: Output, settings: Settings) -> tuple[Sums, jax.Array, jax.Array]:
    """The three sums over a chunk, its logits `[batch, chunk, padded vocabulary]`, their log-normaliser; float32."""
    logits = einsum_float32("bse,ve->bsv", chunk.hidden, output.table)
    if output.bias is not None:
        logits = logits + output.bias
    index = jnp.arange(logits.shape[-1])
    if settings.vocabulary_size < logits.shape[-1]:
        logits = jnp.where(index < settings.vocabulary_size, logits, jnp.finfo(jnp.float32).min)
    logits = constrain(logits, "local_batch", "chunk", "vocabulary")
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # A sum over the vocabulary instead of an indexed read: it stays local where the vocabulary is sharded.
    target_logits = jnp.sum(jnp.where(index == chunk.targets[..., None], logits, 0), axis=-1)
    loss = jnp.sum(chunk.weights * (normaliser[..., 0] - target_logits))
    z = jnp.sum(chunk.weights * jnp.square(normaliser[..., 0]))
    return (loss + settings.z_weight * z, loss, z), logits, normaliser


def _over_chunks(
    function: Callable[[Any, Rows], tuple[Any, Any]], carry: Any, rows: Rows, size: int
) -> tuple[Any, Any]:
    """`function(carry, chunk) -> (carry, result)` over chunks of positions; results joined along the sequence."""
    length = rows.hidden.shape[1]
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


def _zeros() -> Sums:
    zero = jnp.zeros((), jnp.float32)
    return (zero, zero, zero)
