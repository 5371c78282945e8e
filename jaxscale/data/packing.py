"""How documents become rows: the views of a token dataset.

    end_to_end   documents laid end to end and cut
    one_a_row    one document a row, padded; a longer one goes on in further rows of its own
    best_fit     no document that fits a row is cut; a longer one fills whole rows, and what is left of it is packed
                 like a document

The last two read a plan (`packing_plan.py`), which is made when it is first needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxscale.data.packing_plan import Plan, find_or_make_plan
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import PADDING_ROW, DocumentSpan, Rows, TokenDataset, ranges


class View(Protocol):
    """A token dataset at one sequence length and packing."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def padding_share(self) -> float:
        """Share of the rows' places that is padding."""
        ...

    def gather(self, rows: np.ndarray) -> Rows:
        """The rows with these indices (`[n]` integers; `PADDING_ROW` gives an empty one), all at once."""
        ...

    def gather_into(self, out: Rows, places: np.ndarray, rows: np.ndarray) -> None:
        """The same, written to places (`[n] int64`) of `out`, which come from `Rows.empty`."""
        ...

    def documents_in_row(self, row: int) -> list[DocumentSpan]:
        """The parts of documents in a row, in order."""
        ...


def open_view(dataset: TokenDataset, sequence_length: int, packing: str, progress: Progress = silent) -> View:
    """The view of a dataset at this length (tokens) and `data.packing`.

    Where it needs a plan that is not there yet, the plan is made; of several processes one does it, the others wait.

    Raises:
        Refused: the plan is damaged.
        Fault: the plan cannot be written.
    """
    if packing == "end_to_end":
        return EndToEnd(dataset, sequence_length)
    return Planned(dataset, find_or_make_plan(dataset, sequence_length, packing, progress))


@dataclass(frozen=True)
class EndToEnd:
    """The view whose rows the dataset itself cuts; only the last one is padded."""

    dataset: TokenDataset
    sequence_length: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.dataset.rows(self.sequence_length)

    @property
    def padding_share(self) -> float:
        """Share of the rows' places that is padding."""
        return 1 - self.dataset.tokens / (self.rows * self.sequence_length)

    def gather(self, rows: np.ndarray) -> Rows:
        """See `View`."""
        return self.dataset.gather(rows, self.sequence_length)

    def gather_into(self, out: Rows, places: np.ndarray, rows: np.ndarray) -> None:
        """See `View`."""
        self.dataset.gather_into(out, places, rows)

    def documents_in_row(self, row: int) -> list[DocumentSpan]:
        """See `View`."""
        return self.dataset.documents_in_row(row, self.sequence_length)


@dataclass(frozen=True)
class Planned:
    """The view whose rows a plan makes of pieces of documents."""

    dataset: TokenDataset
    plan: Plan

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.plan.rows

    @property
    def padding_share(self) -> float:
        """Share of the rows' places that is padding."""
        return 1 - self.dataset.tokens / (self.rows * self.plan.sequence_length)

    def gather(self, rows: np.ndarray) -> Rows:
        """See `View`."""
        out = Rows.empty(len(rows), self.plan.sequence_length)
        self.gather_into(out, np.arange(len(rows)), rows)
        return out

    def gather_into(self, out: Rows, places: np.ndarray, rows: np.ndarray) -> None:
        """See `View`.

        In `starts` also a piece that continues a document is marked, so that it does not see the pieces before it; at
        the beginning of a row, where there are none, only the start of a document is.
        """
        rows, width, offsets = np.asarray(rows, np.int64), self.plan.sequence_length, self.dataset.offsets
        row, pieces = self._pieces(rows)
        length = pieces["length"].astype(np.int64)
        lengths = np.bincount(row, length, len(rows)).astype(np.int64)
        column = np.cumsum(length) - length - (np.cumsum(lengths) - lengths)[row]
        begin = pieces["begin"].astype(np.int64)
        shard = np.searchsorted(offsets, begin, "right") - 1
        source, target = begin - offsets[shard], places[row] * width + column
        out.lengths[places] = lengths
        out.starts.reshape(-1)[target] = pieces["opens"] | (column > 0)
        for place, real in zip(places.tolist(), lengths.tolist(), strict=True):
            out.tokens[place, real:] = 0
        flat, shards = out.tokens.reshape(-1), {number: self.dataset.shard(number)[0] for number in set(shard.tolist())}
        # One slice a piece: cheaper than an index for each token, whatever the number of shards.
        for number, at, to, count in zip(*(x.tolist() for x in (shard, source, target, length)), strict=True):
            flat[to : to + count] = shards[number][at : at + count]

    def documents_in_row(self, row: int) -> list[DocumentSpan]:
        """See `View`."""
        spans = []
        for begin, length, _ in self._pieces(np.array([row]))[1].tolist():
            document, first, tokens = self.dataset.document_at(begin)
            spans.append(DocumentSpan(document, first, first + length - 1, tokens))
        return spans

    def _pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All pieces of these rows, in order: `[pieces] int64` indices into `rows`, and `[pieces] PIECE`."""
        if rows.size and not PADDING_ROW <= rows.min() <= rows.max() < self.rows:
            raise IndexError(f"rows {rows.min()} to {rows.max()}; there are {self.rows}")
        first, count = self.plan.pieces_of_rows(rows)
        row, piece = ranges(first, first + count)
        return row, self.plan.pieces[piece]
