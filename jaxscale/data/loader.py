"""Batches of a run, gathered ahead of the step: a Grain graph over batch numbers.

Its element number k is the batch of update k, a pure function of the order and of k. So there is no iterator state to
store: a run that resumes at update k builds the graph from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.schema import Config
from jaxscale.data.order import Order, Phase, Spread, cursor_at_step, phase_at
from jaxscale.data.store import TokenDataset


class HostBatch(NamedTuple):
    """This process's part of one global batch."""

    step: int
    """Updates before it."""
    cursor: int
    """Examples consumed before it."""
    rows: np.ndarray
    """`[rows] int64`: which rows of the global batch these are."""
    tokens: np.ndarray
    """`[rows, sequence] int32`: stored ids, 0 where padded."""
    starts: np.ndarray
    """`[rows, sequence] bool`: True where a document begins."""
    lengths: np.ndarray
    """`[rows] int32`: real tokens of each row; 0: a padding row."""


def make_order(config: Config, dataset: TokenDataset) -> Order:
    """The order of a dataset's rows in a run of this config: one phase with one batch and one sequence length."""
    length = config.data.sequence_length
    phases = (Phase(0, config.batch.global_size, length),)
    return Order(dataset.fingerprint, config.seed, {length: dataset.rows(length)}, config.data.shuffle, phases)


def batch_at(dataset: TokenDataset, order: Order | Spread, step: int, rows: np.ndarray) -> HostBatch:
    """The given rows (`[n]` row numbers within the global batch) of the batch of update `step` (from 0)."""
    cursor = cursor_at_step(order.phases, step)
    length = phase_at(order.phases, cursor).sequence_length
    return HostBatch(step, cursor, rows, *dataset.gather(order.rows_of(cursor + rows), length))


def batches(
    dataset: TokenDataset,
    order: Order | Spread,
    first_step: int,
    last_step: int,
    rows: np.ndarray,
    read_threads: int,
    read_ahead: int,
    finish: Callable[[HostBatch], Any] = lambda batch: batch,
) -> Iterator[Any]:
    """The batches of updates `first_step` up to, not including, `last_step`.

    `rows` (`[n]`) are the rows of the global batch that this process wants, in the order it wants them. `read_threads`
    threads gather and `finish` each batch; at most `read_ahead` batches wait. Neither changes what comes. Where a read
    fails, the error is raised here at the batch that needed it.
    """
    import grain  # here, because it loads jax, which `data show` does not need

    rows = np.asarray(rows, np.int64)
    graph = grain.MapDataset.range(first_step, last_step).map(
        lambda step: finish(batch_at(dataset, order, int(step), rows))
    )
    options = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=max(read_threads, read_ahead))
    return iter(graph.to_iter_dataset(options))


def row_digests(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """sha256 of each row's real tokens as little-endian int32: `[rows, sequence]`, `[rows]` -> `[rows, 32] uint8`."""
    digests = [hashlib.sha256(row[:n].astype("<i4").tobytes()).digest() for row, n in zip(tokens, lengths, strict=True)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """sha256 (hex) of the rows' digests (`[global_batch, 32] uint8`), joined in row order of the global batch."""
    return hashlib.sha256(np.ascontiguousarray(digests).tobytes()).hexdigest()
