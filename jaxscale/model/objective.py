"""What a batch is and what is asked of the model: causal or masked language modelling.

The host sends token ids, document starts and row lengths; everything else (segments, positions, targets, weights,
masks) is computed here, inside the step. An objective is pure: `examples` turns a batch into inputs and targets, and
`loss` gives what is minimised and named losses, each a sum and the count that it is to be divided by.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxscale.config.model import CausalObjective, MaskedObjective
from jaxscale.config.schema import Config
from jaxscale.model.attention import Mask
from jaxscale.model.loss import Output, cross_entropy
from jaxscale.model.transformer import Transformer

Batch = dict[str, jax.Array]


class Field(NamedTuple):
    """One array of a batch."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]


class Examples(NamedTuple):
    """A batch made ready: every array `[microsteps, rows, sequence]` but for `lengths`, `[microsteps, rows]`."""

    inputs: jax.Array
    """int32 ids that the model sees."""
    targets: jax.Array
    """int32 ids that it is to predict."""
    weights: jax.Array
    """float32; 0 where nothing is predicted."""
    positions: jax.Array
    """int32, from 0 in each document."""
    segments: jax.Array | None
    """int32 number of the document, -1 for padding; None where attention crosses documents."""
    lengths: jax.Array
    """int32 number of real tokens of a row."""


class Term(NamedTuple):
    """A reported loss in parts that can be added up: the sum over its items, and their number."""

    total: jax.Array
    items: jax.Array


class Objective(Protocol):
    """What the training step needs of an objective; a user's own has these members."""

    def batch(self, microsteps: int, rows: int, sequence: int) -> dict[str, Field]:
        """The arrays that the host sends."""
        ...

    def examples(self, batch: Batch, keys: jax.Array) -> Examples:
        """Inputs and targets from a batch; `keys` `[microsteps, rows]` are PRNG keys, one for each row."""
        ...

    def loss(
        self, model: Transformer, examples: Examples, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Term]]:
        """For one microstep: the sum over its weighted tokens of what is minimised, and the terms to report.

        The step divides the sum by the weights of the whole global batch, whatever the microstep.
        """
        ...


def make_objective(config: Config, mask_id: int | None) -> Objective:
    """The objective of a config; `mask_id` is the mask token of the dataset's tokenizer."""
    if config.objective.kind == "masked":
        chosen = config.objective.mask_id if config.objective.mask_id is not None else mask_id
        assert chosen is not None, "train/build.py refuses a masked objective without a mask token"
        return MaskedLanguageModel(config, config.objective, chosen)
    return CausalLanguageModel(config, config.objective)


class LanguageModel:
    """What both objectives share: the batch of packed rows, and the cross-entropy of the model's hidden states."""

    def __init__(self, config: Config, objective: CausalObjective | MaskedObjective) -> None:
        self.vocabulary_size = config.model.vocabulary_size
        self.causal = config.model.causal
        self.attend_across_documents = config.data.attend_across_documents
        self.z_weight = objective.z_loss
        self.chunk = objective.logits_chunk

    def batch(self, microsteps: int, rows: int, sequence: int) -> dict[str, Field]:
        """Token ids, document starts, and the number of real tokens of each row (padding only at the end)."""
        row, token = ("microstep", "batch"), ("microstep", "batch", "sequence")
        narrow = self.vocabulary_size <= 2**16  # as ids are then stored: half the bytes on the way to the device
        return {
            "tokens": Field((microsteps, rows, sequence), jnp.uint16 if narrow else jnp.int32, token),
            "starts": Field((microsteps, rows, sequence), jnp.bool_, token),
            "lengths": Field((microsteps, rows), jnp.int32, row),
        }

    def layout(self, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of each token: number of its document in the row (-1: padding), position in it, whether it is real."""
        index = jnp.arange(batch["tokens"].shape[-1], dtype=jnp.int32)
        real = index < batch["lengths"][..., None]
        segments = jnp.where(real, jnp.cumsum(batch["starts"], axis=-1, dtype=jnp.int32), -1)
        first = jax.lax.cummax(jnp.where(batch["starts"], index, 0), axis=batch["starts"].ndim - 1)
        return segments, index - first, real

    def loss(
        self, model: Transformer, examples: Examples, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Term]]:
        """Cross-entropy and z-loss of one microstep, `[rows, sequence]` a field: summed, not yet divided."""
        mask = Mask(self.causal, examples.segments, None if examples.segments is not None else examples.lengths)
        hidden = model(examples.inputs, examples.positions, mask, dropout_keys)
        bias = model.head.bias
        output = Output(model.output_table().used(model.dtype), None if bias is None else bias.used(jnp.float32))
        sums = cross_entropy(
            hidden,
            output,
            examples.targets,
            examples.weights,
            vocabulary_size=self.vocabulary_size,
            z_weight=self.z_weight,
            chunk=self.chunk,
        )
        count = jnp.sum(examples.weights)
        reported = {"loss": Term(sums.cross_entropy, count)}
        if self.z_weight:
            reported["z_loss"] = Term(sums.z, count)
        return sums.total, reported

    def _examples(
        self, batch: Batch, inputs: jax.Array, targets: jax.Array, weights: jax.Array, layout: tuple[jax.Array, ...]
    ) -> Examples:
        segments, positions, _ = layout
        if self.attend_across_documents:
            index = jnp.arange(inputs.shape[-1], dtype=jnp.int32)
            return Examples(inputs, targets, weights, jnp.broadcast_to(index, inputs.shape), None, batch["lengths"])
        return Examples(inputs, targets, weights, positions, segments, batch["lengths"])


class CausalLanguageModel(LanguageModel):
    """Predict the next token of the same document."""

    def examples(self, batch: Batch, keys: jax.Array) -> Examples:
        """The target of a token is the one after it; the last of a document and of a row has none."""
        tokens, layout = batch["tokens"].astype(jnp.int32), self.layout(batch)
        segments, _, real = layout
        targets = jnp.roll(tokens, -1, axis=-1)
        follows = (segments == jnp.roll(segments, -1, axis=-1)) & real
        weights = follows.at[..., -1].set(False).astype(jnp.float32)
        return self._examples(batch, tokens, targets, weights, layout)


class MaskedLanguageModel(LanguageModel):
    """Predict a share of the tokens, most of which the model sees masked (arXiv 1810.04805, section 3.1)."""

    def __init__(self, config: Config, objective: MaskedObjective, mask_id: int) -> None:
        super().__init__(config, objective)
        self.objective = objective
        self.mask_id = mask_id

    def examples(self, batch: Batch, keys: jax.Array) -> Examples:
        """Each row draws its own masks, so that they do not depend on how a batch is cut or laid out."""
        tokens, layout = batch["tokens"].astype(jnp.int32), self.layout(batch)
        shape = tokens.shape[-1:]

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            choice, treatment, replacement = jax.random.split(key, 3)
            return (
                jax.random.uniform(choice, shape) < self.objective.mask_share,
                jax.random.uniform(treatment, shape),
                jax.random.randint(replacement, shape, 0, self.vocabulary_size),
            )

        chosen, treatment, replacement = jax.vmap(jax.vmap(draw))(keys)
        chosen = chosen & layout[2]
        masked, random = self.objective.replace_share, self.objective.random_share
        shown = jnp.where(treatment < masked, self.mask_id, jnp.where(treatment < masked + random, replacement, tokens))
        inputs = jnp.where(chosen, shown, tokens)
        return self._examples(batch, inputs, tokens, chosen.astype(jnp.float32), layout)


def fold_words(key: jax.Array, number: jax.Array) -> jax.Array:
    """A PRNG key folded with a 64-bit number given as `[2] uint32`, high word first."""
    return jax.random.fold_in(jax.random.fold_in(key, number[0]), number[1])


def row_keys(key: jax.Array, first: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """PRNG keys `[microsteps, rows]`: `key` folded with the number of each row, which counts on from `first`.

    `first` is a 64-bit number `[2] uint32`, high word first.
    """
    index = jnp.arange(shape[0] * shape[1], dtype=jnp.uint32)
    low = first[1] + index
    high = first[0] + (low < index).astype(jnp.uint32)
    return jax.vmap(fold_words, in_axes=(None, 0))(key, jnp.stack([high, low], axis=1)).reshape(shape)
