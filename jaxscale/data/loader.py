"""Batches of a run, gathered ahead of the step: a Grain graph over batch numbers.

A batch is a pure function of the order and of its number, so there is no iterator state to store: a run that resumes at
update k builds the graph from there. An element of the graph is a batch or, where they are small, a block of them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import flags

from jaxscale.config.errors import Fault
from jaxscale.config.phases import cursor_at_step, phase_at
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Examples, Order, Spread
from jaxscale.data.packing import Rows

if TYPE_CHECKING:
    from grain import DatasetIterator


class HostBatch(NamedTuple):
    """This process's part of one global batch."""

    step: int
    """Updates before it."""
    cursor: int
    """Examples consumed before it."""
    rows: np.ndarray
    """`[rows] int64`: which rows of the global batch these are."""
    tokens: np.ndarray
    """`[rows, sequence] uint16 or uint32`: ids as wide as they are stored, 0 where padded."""
    starts: np.ndarray
    """`[rows, sequence] bool`: True where a document begins."""
    lengths: np.ndarray
    """`[rows] int32`: real tokens of each row; 0: a padding row."""


class Reading(NamedTuple):
    """How batches are read; it decides how fast they come, not what comes."""

    workers: int = 0
    """Processes that gather; 0: this one does."""
    threads: int = 1
    """Threads that gather, in each process."""
    ahead: int = 4
    """Most batches that wait."""


BLOCK_TOKENS, BLOCK_BATCHES = 2**22, 32
"""Small batches are gathered several at once, up to about so many tokens and batches: most of the cost of gathering a
small one does not depend on its size."""


def batch_at(mixture: Mixture, order: Order | Spread, step: int, rows: np.ndarray) -> HostBatch:
    """The given rows (`[n]` row numbers within the global batch) of the batch of update `step` (from 0).

    Raises:
        Fault: an id is beyond the vocabulary.
    """
    return batches_at(mixture, order, range(step, step + 1), lambda step: rows)[0]


def batches_at(
    mixture: Mixture, order: Order | Spread, steps: range, rows_of: Callable[[int], np.ndarray]
) -> list[HostBatch]:
    """The rows `rows_of(step)` (see `batch_at`) of the batches of some updates, those of one phase gathered at once."""
    found = []
    for phase, group in groupby(steps, lambda step: phase_at(order.phases, cursor_at_step(order.phases, step))):
        places = [(step, cursor_at_step(order.phases, step), rows_of(step)) for step in group]
        examples = order.examples(np.concatenate([cursor + rows for _, cursor, rows in places]))
        gathered = mixture.gather(examples, phase.sequence_length)
        _check_ids(mixture, examples, gathered)
        end = 0
        for step, cursor, rows in places:
            begin, end = end, end + len(rows)
            found.append(HostBatch(step, cursor, rows, *(array[begin:end] for array in gathered)))
    return found


def _check_ids(mixture: Mixture, examples: Examples, gathered: Rows) -> None:
    largest = int(gathered.tokens.max(initial=0))
    if largest >= mixture.first.vocabulary_size:
        place = int(np.nonzero(gathered.tokens == largest)[0][0])
        dataset = list(mixture.datasets.values())[examples.sources[place]]
        raise Fault(
            f"{dataset.path}: row {examples.rows[place]} holds id {largest}, beyond the vocabulary of "
            f"{dataset.vocabulary_size}: the data are damaged; `jaxscale data verify` finds the file"
        )


def batches(
    mixture: Mixture,
    order: Order | Spread,
    first_step: int,
    last_step: int,
    rows_of: Callable[[int], np.ndarray],
    reading: Reading,
    finish: Callable[[HostBatch], Any] = lambda batch: batch,
) -> Batches:
    """The batches of updates `first_step` up to, not including, `last_step`.

    `rows_of(step)` (`[n]`) are the rows of the global batch that this process wants, in the order it wants them; each
    batch is then given to `finish`, in this process, ahead of being asked for. How they are read does not change what
    comes. Where a read fails, the error is raised at the batch that needed it.
    """
    import grain  # here, because it loads jax, which `data show` does not need

    size = 1
    if first_step < last_step:
        length = phase_at(order.phases, cursor_at_step(order.phases, first_step)).sequence_length
        size = max(1, min(BLOCK_BATCHES, BLOCK_TOKENS // max(1, len(rows_of(first_step)) * length)))
    ahead = max(reading.threads, -(-reading.ahead // size))

    def gather(step: int) -> list[HostBatch | Exception]:
        return _block(mixture, order, range(step, min(step + size, last_step)), rows_of)

    def finish_all(block: list[HostBatch | Exception]) -> list[Any]:
        return [item if isinstance(item, Exception) else finish(item) for item in block]

    options = grain.ReadOptions(num_threads=reading.threads, prefetch_buffer_size=ahead)
    graph = grain.MapDataset.range(first_step, last_step, size).map(lambda step: gather(int(step)))
    if reading.workers == 0:
        return Batches(iter(graph.map(finish_all).to_iter_dataset(options)))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's processes read absl's flags, which only programs of absl parse
    each = grain.MultiprocessingOptions(reading.workers, per_worker_buffer_size=-(-ahead // reading.workers))
    gathered = graph.to_iter_dataset(options).mp_prefetch(each, partial(end_with, os.getpid())).map(finish_all)
    return Batches(iter(grain.experimental.ThreadPrefetchIterDataset(gathered, prefetch_buffer_size=ahead)))


def _block(
    mixture: Mixture, order: Order | Spread, steps: range, rows_of: Callable[[int], np.ndarray]
) -> list[HostBatch | Exception]:
    """Batches gathered at once; where one fails those before it, and the error in its place."""
    with suppress(Exception):
        return [*batches_at(mixture, order, steps, rows_of)]
    found: list[HostBatch | Exception] = []
    for step in steps:
        try:
            found += batches_at(mixture, order, range(step, step + 1), rows_of)
        except Exception as error:
            return [*found, error]
    return found


class Batches:
    """Batches one by one, from blocks of them."""

    def __init__(self, blocks: DatasetIterator) -> None:
        self._blocks = blocks
        self._block: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._block, None)
        while item is None:
            self._block = iter(next(self._blocks))
            item = next(self._block, None)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Ends all threads and processes that read."""
        self._blocks.close()


def end_with(parent: int, worker: int, workers: int) -> None:
    """In a process that gathers: end when the training process is gone, however it went (Grain's would wait for it)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def row_digests(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """sha256 of each row's real tokens as little-endian int32: `[rows, sequence]`, `[rows]` -> `[rows, 32] uint8`."""
    digests = [hashlib.sha256(row[:n].astype("<i4").tobytes()).digest() for row, n in zip(tokens, lengths, strict=True)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def batch_digest(digests: np.ndarray) -> str:
    """sha256 (hex) of the rows' digests (`[global_batch, 32] uint8`), joined in row order of the global batch."""
    return hashlib.sha256(np.ascontiguousarray(digests).tobytes()).hexdigest()
