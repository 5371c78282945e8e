"""Packing plans on disk: which pieces of documents make which rows.

A plan is a function of the dataset's fingerprint, the sequence length and the packing alone. It is a folder beside the
dataset's files or, where that cannot be written, in the cache, and appears under its name only when it is complete:

    plan.json    what it is for
    pieces.npy   [pieces] (begin uint64, length uint32, opens bool), in the order of the rows: where in the dataset a
                 piece begins and how long it is, in tokens, and whether a document begins there
    groups.npy   [groups, 3] int64, stretches of rows of equally many pieces: first row, first piece, pieces a row
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config.errors import Fault, Refused
from jaxscale.data.best_fit import Places, best_fit_decreasing
from jaxscale.data.files import cache_folder, locked
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import TokenDataset, ranges

VERSION = 1
"""Of the plans; another one as soon as the same dataset would be packed otherwise."""
PIECE = np.dtype([("begin", "<u8"), ("length", "<u4"), ("opens", "?")])
CHUNK = 2**20
"""Documents, and pieces, that are worked on at one time: what bounds the memory."""


@dataclass(frozen=True)
class Plan:
    """A plan opened for reading."""

    rows: int
    pieces: np.ndarray
    """`[pieces] PIECE`, memory-mapped."""
    groups: np.ndarray
    """`[groups, 3] int64`: first row, first piece, pieces a row."""

    def pieces_of_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All pieces of these rows (`[n] int64`; of row -1: none), in order: `[pieces] int64` indices into `rows`, and
        `[pieces] PIECE`."""
        first_row, first_piece, count = self.groups[np.searchsorted(self.groups[:, 0], rows, "right") - 1].T
        first = first_piece + (rows - first_row) * count
        row, piece = ranges(first, np.where(rows < 0, first, first + count))
        return row, self.pieces[piece]


def find_or_make_plan(dataset: TokenDataset, sequence_length: int, packing: str, progress: Progress = silent) -> Plan:
    """The plan of a dataset for rows of `sequence_length`, `packing` being `one_a_row` or `best_fit`.

    Raises:
        Refused: it is damaged.
        Fault: it cannot be written.
    """
    purpose: dict[str, Any] = {
        "format": "jaxscale packing plan",
        "version": VERSION,
        "fingerprint": dataset.fingerprint,
        "packing": packing,
        "sequence_length": sequence_length,
    }
    digest = hashlib.sha256(json.dumps(purpose).encode()).hexdigest()
    name = f"packing-{packing}-{sequence_length}-{digest[:12]}"
    beside, cached = dataset.folder / name, cache_folder() / name
    for folder in (beside, cached):
        if folder.exists():
            return _open(folder, purpose)
    folder = beside if os.access(dataset.folder, os.W_OK, effective_ids=True) else cached
    try:
        with locked(folder.with_name(f".{name}.lock")) as alone:
            if not folder.exists():
                _make(folder, dataset, purpose, alone, progress)
    except OSError as error:
        raise Fault(f"{folder}: the packing plan cannot be written: {error}") from error
    return _open(folder, purpose)


def _open(folder: Path, purpose: dict[str, Any]) -> Plan:
    """The plan in `folder`; raises Refused where it is not whole or not for this purpose."""
    try:
        found = json.loads((folder / "plan.json").read_bytes())
        pieces = np.load(folder / "pieces.npy", mmap_mode="r")
        groups = np.load(folder / "groups.npy")
        rows = found["rows"]
        if {name: found[name] for name in purpose} != purpose or pieces.dtype != PIECE or groups.shape[1:] != (3,):
            raise ValueError("it is for another purpose")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{folder}: damaged packing plan ({error}); remove the folder and it is made again") from error
    return Plan(rows, np.asarray(pieces), groups)


def _make(folder: Path, dataset: TokenDataset, purpose: dict[str, Any], alone: bool, progress: Progress) -> None:
    """Write the plan to a hidden sibling of `folder`, which takes its name in the end. `alone`: nobody else does."""
    unfinished = f".{folder.name}.{platform.node()}-"
    if alone:
        for left in folder.parent.glob(f"{unfinished}*"):
            shutil.rmtree(left, ignore_errors=True)
    making = folder.with_name(f"{unfinished}{os.getpid()}")
    making.mkdir()
    try:
        rows = _write(making, dataset, purpose["sequence_length"], purpose["packing"] == "best_fit", progress)
        (making / "plan.json").write_text(json.dumps({**purpose, "rows": rows}) + "\n")
        try:
            making.rename(folder)
        except OSError:
            if not folder.exists():  # else another builder was faster, on a file system without locks
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _write(folder: Path, dataset: TokenDataset, length: int, best_fit: bool, progress: Progress) -> int:
    """Write the arrays of a plan; returns the number of rows."""

    def documents(part: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """`_documents`, with their progress; both passes over them together are the whole work."""
        done = part * dataset.documents
        for begin, size in _documents(dataset):
            yield begin, size
            done += len(size)
            progress(f"packing rows of {length}", done, 2 * dataset.documents)

    counts = _count_pieces((size for _, size in documents(0)), length)
    packed = best_fit_decreasing(counts, length) if best_fit else []
    places = Places(packed) if best_fit else None
    rows_and_pieces = [(group.rows, group.pieces) for group in packed] or [(int(counts.sum()), 1)]
    rows, pieces_a_row = np.array(rows_and_pieces, np.int64).T
    first_piece = np.cumsum(rows * pieces_a_row) - rows * pieces_a_row
    np.save(folder / "groups.npy", np.stack([np.cumsum(rows) - rows, first_piece, pieces_a_row], axis=1))

    pieces = np.lib.format.open_memmap(folder / "pieces.npy", "w+", PIECE, (int(counts.sum()),))
    with open(folder / "pieces.npy", "r+b") as file:
        os.posix_fallocate(
            file.fileno(), 0, os.fstat(file.fileno()).st_size
        )  # else a full disk is a signal, not an error
    done = 0
    for begin, size in documents(1):
        for part in _pieces(begin, size, length):
            pieces[places.take(part["length"]) if places else slice(done, done + len(part))] = part
            done += len(part)
    pieces.flush()
    return int(rows.sum())


def _documents(dataset: TokenDataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All documents in order, some at a time: where each begins in the dataset and its length, `[n] int64` tokens."""
    for number, offset in enumerate(dataset.offsets[:-1]):
        ends = dataset.shard(number)[1]
        begin_of_next = 0
        for at in range(0, len(ends), CHUNK):
            end = ends[at : at + CHUNK].astype(np.int64)
            begin = np.concatenate([[begin_of_next], end[:-1]])
            begin_of_next = end[-1]
            yield offset + begin, end - begin


def _count_pieces(sizes: Iterator[np.ndarray], length: int) -> np.ndarray:
    """Number of pieces of each length, `[length + 1] int64`, of documents of these sizes."""
    counts = np.zeros(length + 1, np.int64)
    for size in sizes:
        whole, rest = np.divmod(size, length)
        counts += np.bincount(rest, minlength=length + 1)
        counts[length] += whole.sum()
    counts[0] = 0
    return counts


def _pieces(begin: np.ndarray, size: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Documents cut where they are longer than `length`: `[n] PIECE` at a time, in order."""
    ends = np.cumsum(-(-size // length))
    for first in range(0, int(ends[-1]), CHUNK):
        number = np.arange(first, min(first + CHUNK, int(ends[-1])))
        document = np.searchsorted(ends, number, "right")
        earlier = number - ends[document] - (-size[document] // length)  # pieces of the same document
        pieces = np.empty(len(number), PIECE)
        pieces["begin"] = begin[document] + earlier * length
        pieces["length"] = np.minimum(size[document] - earlier * length, length)
        pieces["opens"] = earlier == 0
        yield pieces
