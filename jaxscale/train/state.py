"""The whole state of a run on the devices: what a step takes and returns, and what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "step",
        "cursor",
        "valid_tokens",
        "skipped",
        "params",
        "model_state",
        "optimizer_state",
        "extras",
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes.

    The three counters are 64-bit numbers kept as `[2] uint32`, high word first, because JAX has no 64-bit integers by
    default; `to_int` reads them as Python integers.
    """

    step: jax.Array
    """Updates done, skipped ones included."""
    cursor: jax.Array
    """Sequences consumed: the loader's whole state."""
    valid_tokens: jax.Array
    """Tokens with a target, consumed so far."""
    skipped: jax.Array
    """uint32: updates whose loss or gradient was not finite; the optimizer's count is step - skipped."""
    params: Any
    """Nested dict of float32 arrays."""
    model_state: Any
    """What the step changes without gradients (router biases, scales of narrow formats)."""
    optimizer_state: Any
    extras: Any
    """Averages and the like."""


def initial_state(params: Any, model_state: Any, optimizer_state: Any) -> TrainState:
    """The state before the first update."""
    zero = jnp.zeros(2, jnp.uint32)
    return TrainState(zero, zero, zero, jnp.zeros((), jnp.uint32), params, model_state, optimizer_state, {})


class ModelArrays(TypedDict):
    """The part of a state that evaluation and generation need, under the names that it has in a checkpoint."""

    params: Any
    model_state: Any


def model_of(state: TrainState) -> ModelArrays:
    """The model's arrays, or their shapes and shardings."""
    return ModelArrays(params=state.params, model_state=state.model_state)


def add(number: jax.Array, amount: jax.Array | int) -> jax.Array:
    """A 64-bit number `[2] uint32` (high, low) plus a non-negative amount below 2^32."""
    low = number[1] + jnp.asarray(amount, jnp.uint32)
    return jnp.stack([number[0] + (low < number[1]).astype(jnp.uint32), low])


def to_int(number: np.ndarray | jax.Array) -> int:
    """A 64-bit number `[2] uint32` as a Python integer."""
    high, low = np.asarray(number)
    return (int(high) << 32) | int(low)


def from_int(number: int) -> np.ndarray:
    """A Python integer below 2^64 as `[2] uint32`, high word first."""
    return np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)
