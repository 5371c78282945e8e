"""Law *order*: the global batch at a cursor depends on dataset, seed, phases and the cursor, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxscale.config.errors import Refused
from jaxscale.data.loader import HostBatch, batch_digest, batches, row_digests
from jaxscale.data.order import (
    Order,
    Phase,
    Spread,
    cursor_at_step,
    epoch_key,
    permutation,
    phase_at,
    steps_between,
)
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter

SEQUENCE = 16
BATCH = 8
STEPS = 12


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """53 rows over several shards, so that a few epochs fit into `STEPS` and batches straddle them."""
    folder = tmp_path_factory.mktemp("order") / "dataset"
    generator = np.random.default_rng(0)
    with DatasetWriter(folder, ByteTokenizer(), {}, shard_tokens=200) as writer:
        while writer.tokens < 52 * SEQUENCE:
            writer.add(generator.integers(0, 256, generator.integers(1, 90)).astype(np.uint32), 0)
    return TokenDataset.open(folder)


def order_of(dataset: TokenDataset, seed: int = 0) -> Order:
    return Order(dataset.fingerprint, seed, {SEQUENCE: dataset.rows(SEQUENCE)}, True, (Phase(0, BATCH, SEQUENCE),))


def digests(dataset: TokenDataset, order: Order, parts: list[np.ndarray], first: int = 0, **reading: int) -> list[str]:
    """Digest of each global batch from update `first` on, read by processes that take these rows of it each."""
    reading = {"read_threads": 1, "read_ahead": 4} | reading
    feeds = [batches(dataset, order, first, STEPS, part, **reading) for part in parts]
    found = []
    for step, from_all in enumerate(zip(*feeds, strict=True), start=first):
        assert {(batch.step, batch.cursor) for batch in from_all} == {(step, step * BATCH)}
        joined = np.zeros((BATCH, 32), np.uint8)
        for batch in from_all:
            joined[batch.rows] = row_digests(batch.tokens, batch.lengths)
        found.append(batch_digest(joined))
    return found


ALL = [np.arange(BATCH)]


def test_processes_do_not_appear(dataset: TokenDataset) -> None:
    order = order_of(dataset)
    expected = digests(dataset, order, ALL)
    assert len(set(expected)) == STEPS
    for processes in (2, 4, 8):
        assert digests(dataset, order, np.split(np.arange(BATCH), processes)) == expected
        interleaved = [np.arange(BATCH)[p::processes] for p in range(processes)]
        assert digests(dataset, order, interleaved) == expected


def test_threads_and_read_ahead_do_not_appear(dataset: TokenDataset) -> None:
    order = order_of(dataset)
    expected = digests(dataset, order, ALL)
    for read_threads, read_ahead in ((1, 1), (2, 1), (4, 16), (16, 3)):
        assert digests(dataset, order, ALL, read_threads=read_threads, read_ahead=read_ahead) == expected


def test_restarts_at_every_step_do_not_appear(dataset: TokenDataset) -> None:
    order = order_of(dataset)
    expected = digests(dataset, order, ALL)
    for first in range(STEPS + 1):
        assert digests(dataset, order, ALL, first) == expected[first:]


def test_microbatches_do_not_appear(dataset: TokenDataset) -> None:
    """Rows of a device in the order of its microsteps: 2 devices, 2 microsteps of 2 rows each."""
    order = order_of(dataset)
    by_microstep = np.arange(BATCH).reshape(2, 2, 2)  # microstep, device, row
    assert digests(dataset, order, [by_microstep[:, device].ravel() for device in range(2)]) == digests(
        dataset, order, ALL
    )


def test_a_batch_depends_on_dataset_seed_and_cursor(dataset: TokenDataset) -> None:
    order = order_of(dataset)
    rows = [order.batch(k * BATCH).tolist() for k in range(4)]
    for other in (order_of(dataset, seed=1), replace(order, fingerprint="another")):
        assert all(other.batch(k * BATCH).tolist() != rows[k] for k in range(4))
    assert [order_of(dataset).batch(k * BATCH).tolist() for k in range(4)] == rows


FIRST_ROWS = [582, 626, 609, 495, 68, 233]
LATER_ROWS = [31, 15, 816, 250, 340, 422]


def test_the_order_of_a_seed_stays_what_it_is() -> None:
    """A checkpoint of an older version goes on in the same order; whoever changes this breaks every run in flight."""
    order = Order("f", 7, {8: 1000}, True, (Phase(0, 6, 8),))
    assert order.batch(0).tolist() == FIRST_ROWS
    assert order.batch(3 * 10**9).tolist() == LATER_ROWS


def test_every_row_once_an_epoch_and_epochs_differ(dataset: TokenDataset) -> None:
    order, rows = order_of(dataset), dataset.rows(SEQUENCE)
    epochs = order.rows_of(np.arange(5 * rows)).reshape(5, rows)
    assert (np.sort(epochs) == np.arange(rows)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 5
    stored = replace(order, shuffle=False)
    assert stored.rows_of(np.arange(2 * rows)).tolist() == [*range(rows)] * 2


def test_rows_for_evaluation_are_spread_and_then_padding(dataset: TokenDataset) -> None:
    rows = dataset.rows(SEQUENCE)
    assert Spread(10, 4, (Phase(0, BATCH, SEQUENCE),)).rows_of(np.arange(6)).tolist() == [0, 2, 5, 7, -1, -1]
    once = Spread(rows, rows, (Phase(0, BATCH, SEQUENCE),))
    assert once.rows_of(np.arange(rows - 2, rows + 2)).tolist() == [rows - 2, rows - 1, -1, -1]
    steps = -(-rows // BATCH)
    *_, last = batches(dataset, once, 0, steps, np.arange(BATCH), 1, 4)
    assert isinstance(last, HostBatch)
    assert np.count_nonzero(last.lengths) == rows - (steps - 1) * BATCH
    assert not last.tokens[last.lengths == 0].any() and not last.starts[last.lengths == 0].any()


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000, 4096, 99_991])
def test_permutation_is_a_bijection(length: int) -> None:
    found = permutation(np.arange(length), length, epoch_key("f", 0, 8, 0))
    assert (np.sort(found) == np.arange(length)).all()


def test_permutation_reaches_every_order_of_four() -> None:
    found = {tuple(permutation(np.arange(4), 4, epoch_key("f", 0, 8, epoch))) for epoch in range(500)}
    assert len(found) == 24


def test_permutation_leaves_no_trace_of_the_stored_order() -> None:
    length = 100_000
    found = permutation(np.arange(length), length, epoch_key("f", 0, 8, 0)).astype(float)
    for other in (np.arange(length), np.roll(found, 1), np.roll(found, 317)):
        assert abs(np.corrcoef(found, other)[0, 1]) < 0.02  # standard deviation 0.003
    shares = np.histogram(found[:10_000], bins=10, range=(0, length))[0] / 10_000
    assert (abs(shares - 0.1) < 0.02).all()


def test_index_arithmetic_beyond_32_bits() -> None:
    rows = 3 * 10**9
    order = Order("f", 0, {2048: rows}, True, (Phase(0, 1024, 2048),))
    stored = replace(order, shuffle=False)
    assert stored.rows_of(np.array([2**31 + 5, rows, 10**13 + 1])).tolist() == [2**31 + 5, 0, (10**13 + 1) % rows]
    around = 2**31 + 5 + np.arange(-50_000, 50_000)
    found = order.rows_of(around)
    assert len(np.unique(found)) == len(around) and found.min() >= 0 and found.max() < rows
    assert found.max() > 2**31
    assert len(np.intersect1d(found, order.rows_of(around + rows))) < 50  # the next epoch: chance alone, about 3
    huge = permutation(np.array([0, 2**40 + 1, 2**62 - 1]), 2**62, epoch_key("f", 0, 8, 0))
    assert len(set(huge.tolist())) == 3 and (huge >= 0).all()


PHASES = (Phase(0, 4, 16), Phase(40, 8, 16), Phase(40 + 80, 8, 32), Phase(40 + 80 + 16, 2, 16))


def test_steps_and_cursors_over_phases() -> None:
    cursor, cursors = 0, [0]
    for _ in range(60):
        cursor += phase_at(PHASES, cursor).global_batch
        cursors.append(cursor)
    for step, cursor in enumerate(cursors):
        assert cursor_at_step(PHASES, step) == cursor
        for later, last in enumerate(cursors[step:]):
            assert steps_between(PHASES, cursor, last) == later
    assert cursor_at_step(PHASES, 10 + 10 + 2 + 10**12) == 136 + 2 * 10**12


def test_phases_of_one_length_share_a_view_and_continue_in_it() -> None:
    rows = {16: 1000, 32: 500}
    order = Order("f", 0, rows, True, PHASES)
    one_phase = Order("f", 0, rows, True, (Phase(0, 4, 16),))
    cursors = [*range(120), *range(136, 300)]
    found = np.concatenate([order.rows_of(np.array([cursor])) for cursor in cursors])
    assert np.array_equal(found, one_phase.rows_of(np.arange(len(cursors))))
    other = Order("f", 0, rows, True, (Phase(0, 8, 32),))
    assert np.array_equal(order.batch(120), other.batch(0))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ((), "first phase"),
        ((Phase(8, 4, 16),), "first phase"),
        ((Phase(0, 4, 16), Phase(10, 8, 16)), "cursor 10 is not a whole number of batches of 4 .* nearest is 8"),
        ((Phase(0, 4, 16), Phase(0, 8, 16)), "nearest is 4"),
    ],
)
def test_phases_that_cannot_be(phases: tuple[Phase, ...], message: str) -> None:
    with pytest.raises(Refused, match=message):
        Order("f", 0, {16: 10}, True, phases)
