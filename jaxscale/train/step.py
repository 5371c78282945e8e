"""One update, as a pure function of the state and a batch.

The gradient is a sum over the valid tokens of the global batch divided by their number, however the batch is cut into
microsteps, rows and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxscale.model.objective import Batch, Examples, Objective, Term, fold_words, row_keys
from jaxscale.train.optimizer import Schedule
from jaxscale.train.state import TrainState, add

MASKS, DROPOUT = 1, 2
"""Purposes of random draws inside the step; each has a stream of its own under the run's seed."""

Metrics = dict[str, jax.Array]
OPTIMIZER = "optimizer"
"""What profiles and plans call the operations of the optimizer."""


def make_train_step(
    structure: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    seed: int,
    *,
    dropout: bool,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """`train_step(state, batch) -> (state, metrics)`; every array of the batch is `[microsteps, rows, ...]`."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.key(seed)
        rows = batch["lengths"].shape
        examples = objective.examples(batch, row_keys(jax.random.fold_in(key, MASKS), state.cursor, rows))
        count = jnp.maximum(jnp.sum(examples.weights), 1)
        dropout_keys = None
        if dropout:
            step_key = fold_words(jax.random.fold_in(key, DROPOUT), state.step)
            dropout_keys = row_keys(step_key, jnp.zeros(2, jnp.uint32), rows)

        def loss(params: Any, examples: Examples, keys: jax.Array | None) -> tuple[jax.Array, dict[str, Term]]:
            model = nnx.merge(structure, params, state.model_state)
            total, terms = objective.loss(model, examples, keys)
            return total / count, terms

        def microstep(sums: Any, inputs: tuple[Examples, jax.Array | None]) -> tuple[Any, None]:
            (_, terms), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, *inputs)
            return jax.tree.map(jnp.add, sums, (gradient, terms)), None

        inputs = (examples, dropout_keys)
        terms = jax.eval_shape(loss, state.params, *jax.tree.map(lambda x: x[0], inputs))[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state.params, terms))
        (gradient, terms), _ = jax.lax.scan(microstep, zeros, inputs)

        losses = {name: term.total / jnp.maximum(term.items, 1) for name, term in terms.items()}
        gradient_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(gradient_norm)
        with jax.named_scope(OPTIMIZER):
            updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params)
            params = optax.apply_updates(state.params, updates)
            params, optimizer_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, optimizer_state),
                (state.params, state.optimizer_state),
            )
        metrics = {
            **losses,
            "grad_norm": gradient_norm,
            "learning_rate": schedule(state.step[1] - state.skipped),
        }
        state = replace(
            state,
            step=add(state.step, 1),
            cursor=add(state.cursor, rows[0] * rows[1]),
            valid_tokens=add(state.valid_tokens, jnp.sum(examples.weights > 0)),
            skipped=state.skipped + (~finite).astype(jnp.uint32),
            params=params,
            optimizer_state=optimizer_state,
        )
        return state, {**metrics, "valid_tokens": state.valid_tokens, "skipped": state.skipped}

    return train_step


def make_evaluation_step(
    structure: nnx.GraphDef, objective: Objective, seed: int
) -> Callable[[Any, Any, Batch, jax.Array], dict[str, Term]]:
    """`evaluation_step(params, model_state, batch, cursor) -> terms`: the same losses, without dropout.

    Masks are drawn for the row's number in the dataset (`cursor`: `[2] uint32`, that of the first row of the batch), so
    that they do not depend on the evaluation batch or on training.
    """

    def evaluation_step(params: Any, model_state: Any, batch: Batch, cursor: jax.Array) -> dict[str, Term]:
        key = jax.random.fold_in(jax.random.key(seed), MASKS)
        examples = objective.examples(batch, row_keys(key, cursor, batch["lengths"].shape))
        model = nnx.merge(structure, params, model_state)
        return objective.loss(model, jax.tree.map(lambda x: x[0], examples), None)[1]

    return evaluation_step
