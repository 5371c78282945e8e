"""Rows of this process -> global arrays on the devices, gathered and sent ahead of the step that needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxscale.config.errors import Fault
from jaxscale.config.phases import cursor_at_step, phase_at, step_at_cursor
from jaxscale.data.loader import HostBatch, Reading, batches, row_digests
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Order, Spread

Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding of each array of a batch, `[microsteps, rows, ...]`."""


@dataclass(frozen=True)
class FedBatch:
    """One global batch, of which this process holds the rows of its devices."""

    arrays: dict[str, jax.Array]
    """What the step takes."""
    rows: np.ndarray
    """`[n] int64`: the rows of the global batch that this process holds."""
    digests: np.ndarray | None
    """`[n, 32] uint8`: sha256 of each of them, where they were asked for."""


class Feed:
    """The batches of updates `first_step` up to, not including, `last_step`, and how long each one is waited for."""

    def __init__(
        self,
        mixture: Mixture,
        order: Order | Spread,
        shapes_at: Callable[[int], Shapes],
        reading: Reading,
        *,
        first_step: int,
        last_step: int,
        digests: bool = False,
    ) -> None:
        """The read-ahead begins at once.

        Args:
            mixture: where the rows come from.
            order: which of them.
            shapes_at: the arrays of the batch of an update (from 0).
            reading: how they are read.
            first_step: update (from 0) of the first batch.
            last_step: update after the last one.
            digests: whether to compute the sha256 of each row, too.
        """
        phases = order.phases
        first_steps = {phase: step_at_cursor(phases, phase.first_cursor) for phase in phases}
        own = {phase: process_rows(shapes_at(step)["tokens"]) for phase, step in first_steps.items()}

        def rows_of(step: int) -> np.ndarray:
            return own[phase_at(phases, cursor_at_step(phases, step))]

        def finish(batch: HostBatch) -> FedBatch:
            digested = row_digests(batch.tokens, batch.lengths) if digests else None
            return FedBatch(to_devices(batch, shapes_at(batch.step)), batch.rows, digested)

        self._batches = batches(mixture, order, first_step, last_step, rows_of, reading, finish)

    def next(self) -> tuple[FedBatch, float]:
        """The next batch, and the seconds that it was waited for.

        Raises:
            Fault: a process that gathers has died.
        """
        begin = time.perf_counter()
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            if "Worker process" in str(error):
                reason = str(error).splitlines()[0]
                raise Fault(f"data.workers: a process that gathers batches has died: {reason}") from error
            raise
        return batch, time.perf_counter() - begin

    def close(self) -> None:
        """Ends all threads and processes that read."""
        self._batches.close()


def process_rows(tokens: jax.ShapeDtypeStruct) -> np.ndarray:
    """Rows of the global batch (`[n] int64`, ascending) that lie on this process's devices.

    Row r of microstep m is row m x rows + r of the global batch.
    """
    microsteps, rows, _ = tokens.shape
    indices = tokens.sharding.addressable_devices_indices_map(tokens.shape).values()
    own = np.unique(np.concatenate([np.arange(*index[1].indices(rows)) for index in indices]))
    return (np.arange(microsteps)[:, None] * rows + own[None, :]).reshape(-1)


def to_devices(batch: HostBatch, shapes: Shapes) -> dict[str, jax.Array]:
    """Global arrays from this process's rows (those of `process_rows`), each device given its own part."""
    microsteps = shapes["tokens"].shape[0]
    own = batch.rows[: len(batch.rows) // microsteps]  # of microstep 0: there, numbers of rows are places of rows

    def send(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        local = getattr(batch, name).astype(shape.dtype, copy=False)
        local = local.reshape(microsteps, len(own), *local.shape[1:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # it never is; JAX declares the callback so
            first, last, _ = index[1].indices(shape.shape[1])
            begin = int(np.searchsorted(own, first))
            return local[(index[0], slice(begin, begin + last - first), *index[2:])]

        return jax.make_array_from_callback(shape.shape, shape.sharding, part, dtype=shape.dtype)

    return {name: send(name, shape) for name, shape in shapes.items()}
