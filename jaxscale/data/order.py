"""Which row of which source stands where in the run: pure index arithmetic in NumPy, without tables.

A *cursor* counts the examples that a run has consumed. A *view* is the data at one sequence length, with an order of
its own, in which the phases of that length continue. So, all in closed form:

    cursor -> phase -> place in the view -> (source, how often it was drawn before) -> (epoch, index) -> row

A run can start anywhere at no cost, and processes, devices and workers cannot enter, since they are not in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxscale.config.phases import Phase, phase_at, step_at_cursor
from jaxscale.data.interleave import draws_of, period_of
from jaxscale.data.permutation import permutation, permutation_key


class Examples(NamedTuple):
    """Rows of a run, each by its source and its number in the source's view."""

    sources: np.ndarray
    """`[n] int64`."""
    rows: np.ndarray
    """`[n] int64`; -1: a padding row."""


@dataclass(frozen=True)
class Source:
    """What the order needs to know of a dataset."""

    fingerprint: str
    """The dataset's."""
    rows: Mapping[int, int]
    """Number of its rows at each sequence length of the phases."""
    max_epochs: float | None = None
    """Most passes over them in a view; None: no limit."""

    def limit(self, sequence_length: int) -> int | None:
        """Most rows of it that a view draws."""
        return None if self.max_epochs is None else max(1, int(self.max_epochs * self.rows[sequence_length]))


class Skip(NamedTuple):
    """Places of the view of one sequence length that are left out: `first` up to, not including, `end`."""

    sequence_length: int
    first: int
    end: int


@dataclass(frozen=True)
class Stretch:
    """Places of a view that one mixture holds for, up to the next stretch."""

    first: int
    """Its first place, where a period begins."""
    draws: tuple[int, ...]
    """Draws of each source in a period."""
    drawn: tuple[int, ...]
    """Rows of each source drawn before it."""

    def drawn_before(self, place: int) -> tuple[int, ...]:
        """Rows of each source drawn before a place that lies in it."""
        period = period_of(self.draws)
        periods, rest = divmod(place - self.first, len(period.source))
        return tuple(
            before + periods * draws + bisect.bisect_left(places, rest)
            for before, draws, places in zip(self.drawn, self.draws, period.places, strict=True)
        )

    def place_of(self, source: int, drawn: int) -> int:
        """The place where a source is drawn that was drawn so often before."""
        periods, draw = divmod(drawn - self.drawn[source], self.draws[source])
        period = period_of(self.draws)
        return self.first + periods * len(period.source) + int(period.places[source][draw])


@dataclass(frozen=True)
class Order:
    """The order of rows in a run: a function of these fields and the cursor alone."""

    seed: int
    sources: tuple[Source, ...]
    phases: tuple[Phase, ...]
    packing: str = "end_to_end"
    shuffle: bool = True
    """A new permutation of a source's rows each epoch; False: stored order."""
    renormalize: bool = False
    """Where a source has reached its limit the others go on in proportion; False: there the data ends."""
    skips: tuple[Skip, ...] = ()

    def examples(self, cursors: np.ndarray) -> Examples:
        """The rows at these cursors, `[n]` integers of one phase."""
        cursors = np.asarray(cursors, np.int64)
        if not len(cursors):
            return Examples(cursors, cursors)
        phase = phase_at(self.phases, int(cursors.min()))
        if phase != phase_at(self.phases, int(cursors.max())):
            raise ValueError("cursors of more than one phase")
        consumed = cursors - phase.first_cursor + self._consumed_before(phase)
        return self._views[phase.sequence_length].examples(consumed)

    def batch(self, cursor: int) -> Examples:
        """The whole global batch that begins at this cursor."""
        return self.examples(cursor + np.arange(phase_at(self.phases, cursor).global_batch))

    @property
    def steps(self) -> int | None:
        """Updates until a source's limit ends the data; None: never."""
        return self._end[0]

    @property
    def ended_by(self) -> int | None:
        """The source whose limit ends the data; None: none does."""
        return self._end[1]

    @cached_property
    def _end(self) -> tuple[int, int] | tuple[None, None]:
        for phase, following in pairwise((*self.phases, None)):
            assert phase is not None
            view = self._views[phase.sequence_length]
            there, source = view.length, view.ended_by
            if there is None or source is None:
                continue
            end = phase.first_cursor + max(0, there - self._consumed_before(phase))
            if following is None or end < following.first_cursor:
                return step_at_cursor(self.phases, end), source
        return None, None

    def place_in_view(self, sequence_length: int, cursor: int) -> int:
        """The place of the next row of a view when the run is at a cursor, skips counted."""
        consumed = sum(
            max(0, min(cursor, cursor if following is None else following.first_cursor) - phase.first_cursor)
            for phase, following in pairwise((*self.phases, None))
            if phase is not None and phase.sequence_length == sequence_length
        )
        return int(self._views[sequence_length].places(np.array([consumed]))[0])

    def _consumed_before(self, phase: Phase) -> int:
        """Examples of the phase's view that earlier phases consumed."""
        earlier = pairwise(self.phases[: self.phases.index(phase) + 1])
        return sum(
            following.first_cursor - one.first_cursor
            for one, following in earlier
            if one.sequence_length == phase.sequence_length
        )

    @cached_property
    def _views(self) -> dict[int, _View]:
        return {length: _View(self, length) for length in {phase.sequence_length for phase in self.phases}}


class _View:
    """The order of rows of one sequence length."""

    def __init__(self, order: Order, sequence_length: int) -> None:
        self._order, self._length = order, sequence_length
        self._starts = [
            (order._consumed_before(phase), phase.weights)
            for phase in order.phases
            if phase.sequence_length == sequence_length
        ]
        self._stretches, self._end, self.ended_by = self._mixtures()
        self._kept = _kept(order.skips, sequence_length)

    def examples(self, consumed: np.ndarray) -> Examples:
        """The rows that follow after so many consumed examples each, `[n] int64`."""
        places = self.places(consumed)
        if self._end is not None and int(places.max()) >= self._end:
            raise IndexError(f"place {places.max()} of a view whose sources end at {self._end}")
        sources, drawn = np.empty_like(places), np.empty_like(places)
        stretch_of = np.searchsorted([stretch.first for stretch in self._stretches], places, "right") - 1
        for number in np.unique(stretch_of):
            stretch, chosen = self._stretches[number], stretch_of == number
            period = period_of(stretch.draws)
            periods, place = np.divmod(places[chosen] - stretch.first, len(period.source))
            source = period.source[place]
            sources[chosen] = source
            each = np.array(stretch.drawn)[source] + periods * np.array(stretch.draws)[source]
            drawn[chosen] = each + period.earlier[place]
        return Examples(sources, self._rows(sources, drawn))

    def places(self, consumed: np.ndarray) -> np.ndarray:
        """Places of consumed examples, `[n] int64` -> `[n] int64`: those that are skipped move what follows."""
        firsts, skipped = self._kept
        return consumed + skipped[np.searchsorted(firsts, consumed, "right")]

    @property
    def length(self) -> int | None:
        """Examples until the data ends, without those that are skipped; None: it never does."""
        if self._end is None:
            return None
        ends = [(s.first, s.end) for s in _merged(self._order.skips, self._length)]
        return self._end - sum(max(0, min(end, self._end) - first) for first, end in ends)

    def _rows(self, sources: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Rows of sources that were drawn so often before."""
        order, rows = self._order, np.empty_like(drawn)
        for number in np.unique(sources):
            source = order.sources[number]
            count, chosen = source.rows[self._length], np.flatnonzero(sources == number)
            epochs, index = np.divmod(drawn[chosen], count)
            if order.shuffle:
                for epoch in np.unique(epochs):
                    within = epochs == epoch
                    name = f"rows {source.fingerprint} {order.seed} {order.packing} {self._length} {epoch}"
                    index[within] = permutation(index[within], count, permutation_key(name))
            rows[chosen] = index
        return rows

    def _mixtures(self) -> tuple[list[Stretch], int | None, int | None]:
        """The stretches of the view, the place at which its data ends, and the source that ends it.

        One begins where a phase changes the weights, and where a source reaches its limit if the others go on.
        """
        limits = [source.limit(self._length) for source in self._order.sources]
        stretches: list[Stretch] = []
        weights: tuple[float, ...] | None = None
        for (first, wanted), following in pairwise((*self._starts, (None, ()))):
            assert first is not None
            if wanted != weights:
                weights, draws = wanted, draws_of(wanted)
                drawn = stretches[-1].drawn_before(first) if stretches else (0,) * len(draws)
                stretches.append(Stretch(first, draws, drawn))
            until = following[0]
            while True:
                stretch = stretches[-1]
                ends = [
                    (stretch.place_of(source, limit), source)
                    for source, limit in enumerate(limits)
                    if limit is not None and stretch.draws[source]
                ]
                if not ends or (until is not None and min(ends)[0] >= until):
                    break
                place, source = min(ends)
                left = tuple(0 if index == source else draws for index, draws in enumerate(stretch.draws))
                if not self._order.renormalize or not any(left):
                    return stretches, place, source
                stretches.append(Stretch(place, left, stretch.drawn_before(place)))
        return stretches, None, None


def _merged(skips: tuple[Skip, ...], sequence_length: int) -> Iterator[Skip]:
    """The ranges of one view in order, overlapping ones joined."""
    joined: Skip | None = None
    for skip in sorted(s for s in skips if s.sequence_length == sequence_length):
        if joined is not None and skip.first <= joined.end:
            joined = joined._replace(end=max(joined.end, skip.end))
            continue
        if joined is not None:
            yield joined
        joined = skip
    if joined is not None:
        yield joined


def _kept(skips: tuple[Skip, ...], sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Consumed examples from which on each range is behind, `[ranges]`; places skipped by then, `[ranges + 1]`."""
    firsts, skipped = [], [0]
    for skip in _merged(skips, sequence_length):
        firsts.append(skip.first - skipped[-1])
        skipped.append(skipped[-1] + skip.end - skip.first)
    return np.array(firsts, np.int64), np.array(skipped, np.int64)


@dataclass(frozen=True)
class Spread:
    """So many rows of a dataset, evenly spread over it in stored order, then only padding rows (-1): for evaluation."""

    rows: int
    """Rows of the dataset."""
    wanted: int
    """How many of them; at most `rows`."""
    phases: tuple[Phase]
    """The one phase."""

    def examples(self, cursors: np.ndarray) -> Examples:
        """The rows at these cursors, `[n]` integers."""
        cursors = np.asarray(cursors, np.int64)
        rows = np.where(cursors < self.wanted, cursors * self.rows // self.wanted, -1)
        return Examples(np.zeros_like(rows), rows)
