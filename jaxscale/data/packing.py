"""How documents become rows: the views of a token dataset, and rows gathered from them.

    end_to_end   documents laid end to end and cut
    one_a_row    one document a row, padded; a longer one goes on in further rows of its own
    best_fit     no document that fits a row is cut; a longer one fills whole rows, and what is left of it is packed
                 like a document

The last two read a plan (`packing_plan.py`), which is made when it is first needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxscale.data.packing_plan import Plan, find_or_make_plan
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import Parts, TokenDataset

PADDING_ROW = -1
"""Index of a row that is nothing but padding: length 0, all ids 0."""


class Rows(NamedTuple):
    """Rows made of documents."""

    tokens: np.ndarray
    """`[rows, sequence] uint16 or uint32`: ids as wide as they are stored, 0 where padded."""
    starts: np.ndarray
    """`[rows, sequence] bool`: True where a document begins."""
    lengths: np.ndarray
    """`[rows] int32`: number of real tokens; padding is at the end only."""


class Cut(NamedTuple):
    """What rows are made of."""

    row: np.ndarray
    """`[parts] int64`: the row that a part lies in, ascending."""
    parts: Parts
    """Parts of the dataset's shards, in the order in which they stand in the row."""
    start_part: np.ndarray
    """`[starts] int64`: the part in which a document begins."""
    start_place: np.ndarray
    """`[starts] int64`: where in that part."""

    @property
    def sizes(self) -> np.ndarray:
        """`[parts] int64`: tokens of each part."""
        return self.parts.high - self.parts.low

    @property
    def columns(self) -> np.ndarray:
        """`[parts] int64`: where in its row each part stands."""
        before = np.cumsum(self.sizes) - self.sizes
        return before - before[np.searchsorted(self.row, self.row)]


class DocumentSpan(NamedTuple):
    """The part of a document that lies in a row."""

    document: int
    """Index of the document in the dataset."""
    first: int
    """Position in the document of the row's first token of it."""
    last: int
    """Position in the document of the row's last token of it."""
    tokens: int
    """Length of the whole document."""


@dataclass(frozen=True)
class View(ABC):
    """A token dataset at one sequence length and packing."""

    dataset: TokenDataset
    sequence_length: int

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows."""

    @abstractmethod
    def cut(self, rows: np.ndarray) -> Cut:
        """What the rows with these indices (`[n] int64`; `PADDING_ROW`: one without parts) are made of.

        Raises:
            IndexError: there is no such row.
        """

    @property
    def padding_share(self) -> float:
        """Share of the rows' places that is padding."""
        return 1 - self.dataset.tokens / (self.rows * self.sequence_length)

    def gather(self, rows: np.ndarray) -> Rows:
        """The rows with these indices (`[n]` integers); as `gather`."""
        rows = np.asarray(rows, np.int64)
        return gather({0: self}, np.zeros_like(rows), rows, self.sequence_length)

    def documents_in_row(self, row: int) -> list[DocumentSpan]:
        """The parts of documents in a row, in order."""
        cut = self.cut(np.array([row]))
        columns, spans = cut.columns, []
        positions = self.dataset.offsets[cut.parts.shard] + cut.parts.low
        starts = {0, *(columns[cut.start_part] + cut.start_place).tolist()}
        for first, following in pairwise([*sorted(starts), int(cut.sizes.sum())]):
            part = np.searchsorted(columns, first, "right") - 1
            document, place, tokens = self.dataset.document_at(int(positions[part] + first - columns[part]))
            spans.append(DocumentSpan(document, place, place + following - first - 1, tokens))
        return spans

    def _check(self, rows: np.ndarray) -> None:
        if rows.size and not PADDING_ROW <= rows.min() <= rows.max() < self.rows:
            raise IndexError(f"rows {rows.min()} to {rows.max()}; there are {self.rows}")


@dataclass(frozen=True)
class EndToEnd(View):
    """The dataset cut at every `sequence_length` tokens; only the last row is padded."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return -(-self.dataset.tokens // self.sequence_length)

    def cut(self, rows: np.ndarray) -> Cut:
        """See `View`."""
        self._check(rows)
        real = np.flatnonzero(rows != PADDING_ROW)
        begin = rows[real] * self.sequence_length
        parts = self.dataset.parts(begin, np.minimum(self.dataset.tokens - begin, self.sequence_length))
        return Cut(real[parts.run], parts, *self.dataset.starts(parts))


@dataclass(frozen=True)
class Planned(View):
    """Rows that a plan makes of pieces of documents."""

    plan: Plan

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.plan.rows

    def cut(self, rows: np.ndarray) -> Cut:
        """See `View`.

        A document counts as beginning also where a piece continues one, so that it does not see the pieces before it;
        at the beginning of a row, where there are none, only where it really does.
        """
        self._check(rows)
        row, pieces = self.plan.pieces_of_rows(rows)
        parts = self.dataset.parts(pieces["begin"].astype(np.int64), pieces["length"].astype(np.int64))
        follows = np.zeros(len(row), bool)
        follows[1:] = row[1:] == row[:-1]
        starts = np.flatnonzero(pieces["opens"] | follows)  # of pieces, which are parts: no document spans shards
        return Cut(row, parts, starts, np.zeros_like(starts))


def open_view(dataset: TokenDataset, sequence_length: int, packing: str, progress: Progress = silent) -> View:
    """The view of a dataset at this length (tokens) and `data.packing`.

    Where it needs a plan that is not there yet, the plan is made; of several processes one does it, the others wait.

    Raises:
        Refused: the plan is damaged.
        Fault: the plan cannot be written.
    """
    if packing == "end_to_end":
        return EndToEnd(dataset, sequence_length)
    return Planned(dataset, sequence_length, find_or_make_plan(dataset, sequence_length, packing, progress))


def gather(views: Mapping[int, View], sources: np.ndarray, rows: np.ndarray, sequence_length: int) -> Rows:
    """Rows of several views, all at once.

    Python sees a slice for every part, and no token: NumPy lays all slices end to end in one call.

    Args:
        views: by the number of the source, those that occur in `sources`.
        sources: `[n] int64`.
        rows: `[n] int64`, the row of each source's view, or `PADDING_ROW`.
        sequence_length: of all views.

    Raises:
        IndexError: there is no such row.
    """
    shape = (len(rows), sequence_length)
    starts, lengths = np.zeros(shape, bool), np.zeros(len(rows), np.int32)
    places, slices = [], []
    for source, view in views.items():
        chosen = np.flatnonzero(sources == source)
        cut = view.cut(rows[chosen])
        place, columns = chosen[cut.row], cut.columns
        lengths[chosen] = np.bincount(cut.row, cut.sizes, len(chosen))
        starts.reshape(-1)[(place * sequence_length + columns)[cut.start_part] + cut.start_place] = True
        places.append(place)
        slices += view.dataset.slices(cut.parts)
    short = np.flatnonzero(lengths < sequence_length)
    padding = np.zeros(sequence_length, np.uint16)
    slices += [padding[length:] for length in lengths[short].tolist()]
    tokens = np.empty(shape, np.result_type(np.uint16, *(view.dataset.dtype for view in views.values())))
    if slices:
        in_order = np.argsort(np.concatenate([*places, short]), kind="stable")
        np.concatenate([slices[index] for index in in_order.tolist()], out=tokens.reshape(-1))
    return Rows(tokens, starts, lengths)
