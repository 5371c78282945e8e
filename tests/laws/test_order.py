"""Law *order*: the global batch at a cursor depends on datasets, seed, packing, phases, skips and the cursor alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config.phases import Phase, cursor_at_step, phase_at, step_at_cursor, step_at_tokens, tokens_at_step
from jaxscale.data.interleave import PERIOD, draws_of, period_of
from jaxscale.data.loader import HostBatch, Reading, batch_digest, batches, row_digests
from jaxscale.data.mixture import Mixture
from jaxscale.data.order import Order, Skip, Source, Spread
from jaxscale.data.packing import EndToEnd
from jaxscale.data.permutation import permutation, permutation_key
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter

PLAIN = Reading()
SEQUENCE = 16
BATCH = 8
STEPS = 12


def make_dataset(folder: Path, rows: int, seed: int) -> TokenDataset:
    """So many rows over several shards, so that batches straddle them."""
    generator = np.random.default_rng(seed)
    with DatasetWriter(folder, ByteTokenizer(), {}, shard_tokens=200) as writer:
        while writer.tokens < (rows - 1) * SEQUENCE:
            room = rows * SEQUENCE - writer.tokens
            writer.add(generator.integers(0, 256, min(generator.integers(1, 90), room)).astype(np.uint32), 0)
    return TokenDataset.open(folder)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """53 rows, so that a few epochs fit into `STEPS`."""
    return Mixture({"train": make_dataset(tmp_path_factory.mktemp("order") / "dataset", 53, 0)}, "end_to_end")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """A large, a small and a tiny source."""
    folder = tmp_path_factory.mktemp("order")
    rows = {"code": 40, "news": 9, "web": 120}
    datasets = {name: make_dataset(folder / name, count, seed) for seed, (name, count) in enumerate(rows.items())}
    return Mixture(datasets, "end_to_end")


def order_of(mixture: Mixture, phases: tuple[Phase, ...] = (Phase(0, BATCH, SEQUENCE),), **fields: Any) -> Order:
    lengths = {phase.sequence_length for phase in phases}
    sources = tuple(
        Source(dataset.fingerprint, {length: EndToEnd(dataset, length).rows for length in lengths})
        for dataset in mixture.datasets.values()
    )
    return Order(**{"seed": 0, "sources": sources, "phases": phases, **fields})


def digests(
    mixture: Mixture, order: Order, parts: list[np.ndarray], first: int = 0, reading: Reading = PLAIN
) -> list[str]:
    """Digest of each global batch from update `first` on, read by processes that take these rows of it each."""
    feeds = [batches(mixture, order, first, STEPS, lambda step, part=part: part, reading) for part in parts]
    found = []
    for step, from_all in enumerate(zip(*feeds, strict=True), start=first):
        assert {(batch.step, batch.cursor) for batch in from_all} == {(step, step * BATCH)}
        joined = np.zeros((BATCH, 32), np.uint8)
        for batch in from_all:
            joined[batch.rows] = row_digests(batch.tokens, batch.lengths)
        found.append(batch_digest(joined))
    return found


ALL = [np.arange(BATCH)]


def test_processes_do_not_appear(mixture: Mixture) -> None:
    order = order_of(mixture)
    expected = digests(mixture, order, ALL)
    assert len(set(expected)) == STEPS
    for processes in (2, 4, 8):
        assert digests(mixture, order, np.split(np.arange(BATCH), processes)) == expected
        interleaved = [np.arange(BATCH)[p::processes] for p in range(processes)]
        assert digests(mixture, order, interleaved) == expected


def test_workers_threads_and_read_ahead_do_not_appear(mixture: Mixture) -> None:
    order = order_of(mixture)
    expected = digests(mixture, order, ALL)
    for reading in (Reading(0, 1, 1), Reading(0, 2, 1), Reading(0, 4, 16), Reading(0, 16, 3), Reading(2, 2, 4)):
        assert digests(mixture, order, ALL, reading=reading) == expected


def test_restarts_at_every_step_do_not_appear(mixture: Mixture) -> None:
    order = order_of(mixture)
    expected = digests(mixture, order, ALL)
    for first in range(STEPS + 1):
        assert digests(mixture, order, ALL, first) == expected[first:]


def test_microbatches_do_not_appear(mixture: Mixture) -> None:
    """Rows of a device in the order of its microsteps: 2 devices, 2 microsteps of 2 rows each."""
    order = order_of(mixture)
    by_microstep = np.arange(BATCH).reshape(2, 2, 2)  # microstep, device, row
    assert digests(mixture, order, [by_microstep[:, device].ravel() for device in range(2)]) == digests(
        mixture, order, ALL
    )


@st.composite
def phase_lists(draw: st.DrawFn) -> tuple[Phase, ...]:
    """A few phases of three sources: batches, lengths and weights at random."""
    phases, cursor = [], 0
    for _ in range(draw(st.integers(1, 4))):
        batch = draw(st.sampled_from([1, 4, 6, 8, 16]))
        weights = draw(st.tuples(*[st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0])] * 3).filter(any))
        phases.append(Phase(cursor, batch, draw(st.sampled_from([SEQUENCE, 2 * SEQUENCE])), weights))
        cursor += batch * draw(st.integers(1, 5))
    return tuple(phases)


@settings(max_examples=40, deadline=None)
@given(
    phases=phase_lists(),
    processes=st.integers(1, 16),
    threads=st.integers(1, 4),
    cut=st.integers(0, STEPS),
    skip=st.tuples(st.integers(0, 60), st.integers(1, 30)),
    seed=st.integers(0, 3),
)
def test_nothing_but_the_order_appears(
    three: Mixture, phases: tuple[Phase, ...], processes: int, threads: int, cut: int, skip: tuple[int, int], seed: int
) -> None:
    """Any phases and skips, read by any number of processes and threads, cut anywhere and resumed by another number."""
    order = order_of(three, phases, seed=seed, skips=(Skip(SEQUENCE, skip[0], sum(skip)),))

    def read(first: int, last: int, processes: int, threads: int) -> list[np.ndarray]:
        """Tokens of each global batch, put together from what each process reads of it."""

        def own(step: int, process: int) -> np.ndarray:
            size = phase_at(phases, cursor_at_step(phases, step)).global_batch
            return np.array_split(np.arange(size), processes)[process]

        feeds = [
            batches(three, order, first, last, partial(own, process=process), Reading(0, threads, 3))
            for process in range(processes)
        ]
        return [np.concatenate([part.tokens for part in parts]) for parts in zip(*feeds, strict=True)]

    whole = read(0, STEPS, 1, 1)
    resumed = [*read(0, cut, processes, threads), *read(cut, STEPS, 17 - processes, 1)]
    assert all(np.array_equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_a_batch_depends_on_dataset_seed_packing_and_cursor(mixture: Mixture) -> None:
    order = order_of(mixture)
    rows = [order.batch(k * BATCH).rows.tolist() for k in range(4)]
    another = replace(order.sources[0], fingerprint="another")
    for other in (replace(order, seed=1), replace(order, packing="best_fit"), replace(order, sources=(another,))):
        assert all(other.batch(k * BATCH).rows.tolist() != rows[k] for k in range(4))
    assert [order_of(mixture).batch(k * BATCH).rows.tolist() for k in range(4)] == rows


FIRST_ROWS = [371, 220, 697, 336, 808, 403]
LATER_ROWS = [479, 219, 321, 350, 889, 776]


def test_the_order_of_a_seed_stays_what_it_is() -> None:
    """A checkpoint of an older version goes on in the same order; whoever changes this breaks every run in flight."""
    order = Order(7, (Source("f", {8: 1000}),), (Phase(0, 6, 8),))
    assert order.batch(0).rows.tolist() == FIRST_ROWS
    assert order.batch(3 * 10**9).rows.tolist() == LATER_ROWS


def test_every_row_once_an_epoch_and_epochs_differ(mixture: Mixture) -> None:
    order, rows = order_of(mixture), mixture.rows(SEQUENCE)
    epochs = order.examples(np.arange(5 * rows)).rows.reshape(5, rows)
    assert (np.sort(epochs) == np.arange(rows)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 5
    stored = replace(order, shuffle=False)
    assert stored.examples(np.arange(2 * rows)).rows.tolist() == [*range(rows)] * 2


def test_rows_for_evaluation_are_spread_and_then_padding(mixture: Mixture) -> None:
    rows = mixture.rows(SEQUENCE)
    assert Spread(10, 4, (Phase(0, BATCH, SEQUENCE),)).examples(np.arange(6)).rows.tolist() == [0, 2, 5, 7, -1, -1]
    once = Spread(rows, rows, (Phase(0, BATCH, SEQUENCE),))
    assert once.examples(np.arange(rows - 2, rows + 2)).rows.tolist() == [rows - 2, rows - 1, -1, -1]
    steps = -(-rows // BATCH)
    *_, last = batches(mixture, once, 0, steps, lambda step: np.arange(BATCH), Reading())
    assert isinstance(last, HostBatch)
    assert np.count_nonzero(last.lengths) == rows - (steps - 1) * BATCH
    assert not last.tokens[last.lengths == 0].any() and not last.starts[last.lengths == 0].any()


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000, 4096, 99_991])
def test_permutation_is_a_bijection(length: int) -> None:
    found = permutation(np.arange(length), length, permutation_key("f 0"))
    assert (np.sort(found) == np.arange(length)).all()


def test_permutation_reaches_every_order_of_four() -> None:
    found = {tuple(permutation(np.arange(4), 4, permutation_key(f"f {epoch}"))) for epoch in range(500)}
    assert len(found) == 24


def test_permutation_leaves_no_trace_of_the_stored_order() -> None:
    length = 100_000
    found = permutation(np.arange(length), length, permutation_key("f 0")).astype(float)
    for other in (np.arange(length), np.roll(found, 1), np.roll(found, 317)):
        assert abs(np.corrcoef(found, other)[0, 1]) < 0.02  # standard deviation 0.003
    shares = np.histogram(found[:10_000], bins=10, range=(0, length))[0] / 10_000
    assert (abs(shares - 0.1) < 0.02).all()


def test_index_arithmetic_beyond_32_bits() -> None:
    rows = 3 * 10**9
    order = Order(0, (Source("f", {2048: rows}),), (Phase(0, 1024, 2048),))
    stored = replace(order, shuffle=False)
    assert stored.examples(np.array([2**31 + 5, rows, 10**13 + 1])).rows.tolist() == [2**31 + 5, 0, (10**13 + 1) % rows]
    around = 2**31 + 5 + np.arange(-50_000, 50_000)
    found = order.examples(around).rows
    assert len(np.unique(found)) == len(around) and found.min() >= 0 and found.max() < rows
    assert found.max() > 2**31
    assert len(np.intersect1d(found, order.examples(around + rows).rows)) < 50  # the next epoch: chance alone, about 3
    huge = permutation(np.array([0, 2**40 + 1, 2**62 - 1]), 2**62, permutation_key("f 0"))
    assert len(set(huge.tolist())) == 3 and (huge >= 0).all()


PHASES = (Phase(0, 4, 16), Phase(40, 8, 16), Phase(40 + 80, 8, 32), Phase(40 + 80 + 16, 2, 16))


def test_steps_cursors_and_tokens_over_phases() -> None:
    cursor, tokens, places = 0, 0, [(0, 0)]
    for _ in range(60):
        phase = phase_at(PHASES, cursor)
        cursor, tokens = cursor + phase.global_batch, tokens + phase.global_batch * phase.sequence_length
        places.append((cursor, tokens))
    for step, (cursor, tokens) in enumerate(places):
        assert (cursor_at_step(PHASES, step), tokens_at_step(PHASES, step)) == (cursor, tokens)
        assert step_at_cursor(PHASES, cursor) == step_at_tokens(PHASES, tokens) == step
        assert step_at_cursor(PHASES, cursor + 1) == step and step_at_tokens(PHASES, tokens + 1) == step + 1
    assert cursor_at_step(PHASES, 10 + 10 + 2 + 10**12) == 136 + 2 * 10**12


def test_phases_of_one_length_share_a_view_and_continue_in_it() -> None:
    source = Source("f", {16: 1000, 32: 500})
    order = Order(0, (source,), PHASES)
    one_phase = Order(0, (source,), (Phase(0, 4, 16),))
    cursors = [*range(120), *range(136, 300)]
    found = np.concatenate([order.examples(np.array([cursor])).rows for cursor in cursors])
    assert np.array_equal(found, one_phase.examples(np.arange(len(cursors))).rows)
    other = Order(0, (source,), (Phase(0, 8, 32),))
    assert np.array_equal(order.batch(120).rows, other.batch(0).rows)


# Mixtures


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=9).filter(any))
def test_every_prefix_of_a_period_is_within_one_draw_of_the_weights(draws: list[int]) -> None:
    period = period_of(tuple(draws))
    length = sum(draws)
    for source, count in enumerate(draws):
        drawn = np.cumsum(period.source == source)
        assert (abs(drawn * length - np.arange(1, length + 1) * count) < length).all()
        places = np.flatnonzero(period.source == source)
        assert period.earlier[places].tolist() == list(range(count)) and np.array_equal(period.places[source], places)


@pytest.mark.parametrize(
    ("weights", "draws"),
    [
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((1.0, 0.0), (1, 0)),
        ((0.001, 0.999), (1, 999)),
        ((1.0, 1.0, 1.0), (1, 1, 1)),
        ((3.0, 6.0), (1, 2)),
        ((1e-9, 1.0), (1, PERIOD - 1)),  # too small for a period of 2^16: one draw of it
        ((0.123456789, 0.876543211), (8091, PERIOD - 8091)),
    ],
)
def test_weights_are_whole_draws_of_a_period(weights: tuple[float, ...], draws: tuple[int, ...]) -> None:
    assert draws_of(weights) == draws


def drawn_by(order: Order, last: int) -> np.ndarray:
    """Source of each of the first examples, one phase at a time, so that no phase is straddled."""
    return np.concatenate([order.examples(np.array([cursor])).sources for cursor in range(last)])


def test_shares_hold_for_every_prefix_of_a_phase_and_counters_run_on() -> None:
    """70/20/10, then 10/0/90 from a place in the middle of a period on, then unchanged weights with another batch."""
    sources = tuple(Source(name, {16: rows}) for name, rows in (("a", 1000), ("b", 10), ("c", 5)))
    phases = (
        Phase(0, 4, 16, (0.7, 0.2, 0.1)),
        Phase(64, 8, 16, (0.1, 0.0, 0.9)),
        Phase(64 + 72, 2, 16, (0.1, 0.0, 0.9)),
    )
    order = Order(0, sources, phases, shuffle=False)
    found = drawn_by(order, 400)
    for first, last, weights in ((0, 64, (0.7, 0.2, 0.1)), (64, 400, (0.1, 0.0, 0.9))):
        part = found[first:last]
        for source, weight in enumerate(weights):
            share = np.arange(1, len(part) + 1) * weight
            assert (abs(np.cumsum(part == source) - share) < 1).all()
    for source, rows in enumerate((1000, 10, 5)):
        cursors = np.flatnonzero(found == source)
        own = [int(order.examples(np.array([cursor])).rows[0]) for cursor in cursors]
        assert own == [k % rows for k in range(len(cursors))]


def test_every_row_of_every_source_once_an_epoch(three: Mixture) -> None:
    """Weights in the proportion of the rows: one epoch of all is every row exactly once, and the tokens of all."""
    rows = [EndToEnd(dataset, SEQUENCE).rows for dataset in three.datasets.values()]
    phase = Phase(0, sum(rows), SEQUENCE, tuple(map(float, rows)))
    order = order_of(three, (phase,))
    for cursor in (0, sum(rows), 7 * sum(rows)):
        found = order.batch(cursor)
        pairs = sorted(zip(found.sources.tolist(), found.rows.tolist(), strict=True))
        assert pairs == [(source, row) for source, count in enumerate(rows) for row in range(count)]
    gathered = three.gather(order.batch(0), SEQUENCE)
    assert gathered.lengths.sum() == three.tokens


def test_a_limit_ends_the_data_or_its_source() -> None:
    """b has 10 rows and two epochs: its 21st draw never comes. With weights 1:1 that is place 41 at the latest."""
    sources = (Source("a", {16: 10**6}), Source("b", {16: 10}, max_epochs=2.0))
    phases = (Phase(0, 8, 16, (1.0, 1.0)),)
    stop = Order(0, sources, phases)
    assert stop.steps == 5
    assert np.count_nonzero(drawn_by(stop, 40) == 1) == 20
    with pytest.raises(IndexError):
        stop.examples(np.arange(40, 48))
    goes_on = replace(stop, renormalize=True)
    assert goes_on.steps is None
    found = drawn_by(goes_on, 200)
    assert np.count_nonzero(found == 1) == 20 and not found[41:].any()
    last = replace(goes_on, sources=(replace(sources[0], max_epochs=0.0001), sources[1]))
    assert last.steps == (100 + 20) // 8


def test_a_limited_source_leaves_the_others_in_proportion() -> None:
    sources = (Source("a", {16: 5}, max_epochs=1.0), Source("b", {16: 100}), Source("c", {16: 100}))
    order = Order(0, sources, (Phase(0, 4, 16, (0.5, 0.3, 0.2)),), renormalize=True)
    found = drawn_by(order, 200)
    assert np.count_nonzero(found == 0) == 5
    rest = found[np.flatnonzero(found == 0)[-1] + 5 :]
    assert abs(np.count_nonzero(rest == 1) - 0.6 * len(rest)) <= 2


@given(
    ranges=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=4),
    first=st.integers(0, 100),
)
def test_skips_delete_places_and_nothing_else(ranges: list[tuple[int, int]], first: int) -> None:
    source = Source("f", {16: 37, 32: 11})
    plain = Order(0, (source,), (Phase(0, 4, 16),))
    skips = tuple(Skip(16, begin, begin + count) for begin, count in ranges)
    skipped = replace(plain, skips=(*skips, Skip(32, 0, 10**6)))
    gone = {place for begin, count in ranges for place in range(begin, begin + count)}
    kept = [place for place in range(400) if place not in gone][:200]
    expected = plain.examples(np.array(kept)).rows
    assert np.array_equal(skipped.examples(np.arange(200)).rows, expected)
    assert np.array_equal(skipped.examples(np.arange(first, 200)).rows, expected[first:])
    assert skipped.place_in_view(16, first) == kept[first]


def test_a_mixture_of_a_trillion_tokens_needs_no_table() -> None:
    """10^12 tokens in three sources: the batch at example 4 x 10^8 in milliseconds."""
    rows = {"a": 3 * 10**8, "b": 10**8, "c": 10**8}
    sources = tuple(Source(name, {2048: count}) for name, count in rows.items())
    order = Order(0, sources, (Phase(0, 1024, 2048, (0.618, 0.381, 0.001)),))
    found = order.batch(1024 * 400_000)
    assert len({*zip(found.sources.tolist(), found.rows.tolist(), strict=True)}) == 1024
