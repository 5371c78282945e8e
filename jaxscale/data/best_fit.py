"""Best-fit-decreasing bin packing of a histogram: how many rows of which composition hold all pieces.

Every piece goes, the longest first, to the row with the least space left that still takes it, else to a new row. That
is within 11/9 of the fewest rows possible (Johnson, 1974). Pieces of one length are all alike, so it is done with whole
groups of rows of equal composition, as many at a time as there are (arXiv 2107.02027 packs histograms too; best fit for
pretraining: arXiv 2404.10830). The work depends on the number of lengths, not on that of pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np


class Group(NamedTuple):
    """Rows of equal composition."""

    rows: int
    parts: tuple[tuple[int, int], ...]
    """(length, copies) of the pieces of each row, in their order."""

    @property
    def pieces(self) -> int:
        """Pieces in each row."""
        return sum(copies for _, copies in self.parts)

    @property
    def offsets(self) -> Iterator[int]:
        """Where in a row each part begins, counted in pieces."""
        return accumulate((copies for _, copies in self.parts[:-1]), initial=0)


def best_fit_decreasing(counts: np.ndarray, capacity: int) -> list[Group]:
    """Pack `counts[n]` pieces of each length n (`[capacity + 1] int64`) into rows of `capacity`; the fullest first."""
    by_space: dict[int, list[Group]] = {}
    spaces: list[int] = []  # the keys of by_space, ascending

    def put(space: int, group: Group) -> None:
        if group.rows:
            if space not in by_space:
                insort(spaces, space)
                by_space[space] = []
            by_space[space].append(group)

    def take(least: int) -> tuple[int, Group] | None:
        """The rows of least space that is enough."""
        at = bisect_left(spaces, least)
        if at == len(spaces):
            return None
        space = spaces[at]
        group = by_space[space].pop()
        if not by_space[space]:
            del by_space[space], spaces[at]
        return space, group

    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            # A row that best fit has chosen stays its choice until no further piece of this length fits.
            space, group = take(length) or (capacity, Group(-(-left // (capacity // length)), ()))
            copies = space // length
            full = min(group.rows, left // copies)
            left -= full * copies
            put(space - copies * length, Group(full, (*group.parts, (length, copies))))
            if full < group.rows:
                last = min(left, 1)
                put(space - left * length, Group(last, (*group.parts, (length, left))))
                put(space, Group(group.rows - full - last, group.parts))
                left = 0
    return [group for space in spaces for group in by_space[space]]


class Places:
    """The places in a plan of the pieces of each length, handed out one after the other.

    The plan is the rows of all groups, one group after the other, and in it the pieces of each row.
    """

    def __init__(self, groups: list[Group]) -> None:
        """A run is the pieces of one length in all rows of a group; arrays below are `[runs] int64`."""
        sizes = np.array([group.rows * group.pieces for group in groups], np.int64)
        runs = [
            (length, group.rows * copies, copies, group.pieces, first + offset)
            for group, first in zip(groups, (np.cumsum(sizes) - sizes).tolist(), strict=True)
            for (length, copies), offset in zip(group.parts, group.offsets, strict=True)
        ]
        runs.sort(key=lambda run: run[0])
        lengths, counts, self._copies, self._stride, self._place = np.array(runs, np.int64).T.copy()
        # Pieces are numbered by length, and among those of one length in the order in which they come.
        self._first = np.cumsum(counts) - counts
        by_length = np.bincount(lengths, counts).astype(np.int64)
        self._next = np.cumsum(by_length) - by_length

    def take(self, lengths: np.ndarray) -> np.ndarray:
        """Places (`[n] int64`) for the next pieces, which have these lengths (`[n]` integers)."""
        order = np.argsort(lengths, kind="stable")
        counts = np.bincount(lengths, minlength=len(self._next))
        starts = np.cumsum(counts) - counts
        number = np.empty(len(lengths), np.int64)
        number[order] = np.arange(len(lengths)) + np.repeat(self._next - starts, counts)
        self._next += counts
        run = np.searchsorted(self._first, number, "right") - 1
        row, copy = np.divmod(number - self._first[run], self._copies[run])
        return self._place[run] + row * self._stride[run] + copy
