"""Exact duplicates over a whole corpus, in memory that does not grow with it.

Every task writes the hashes of its documents, sorted. Then each of the equal ranges of hashes is looked at by itself:
of the documents with one hash all but the first in the order of the corpus are repeated ones.
"""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np

from jaxscale.data.build.corpus import Document, documents
from jaxscale.data.build.tally import Tally
from jaxscale.data.build.work import REPEATED, SEEN, Work

_SEEN = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")])
_REPEATED = np.dtype([("task", "<u8"), ("document", "<u8")])


def write_seen(work: Work, number: int, tally: Tally) -> None:
    """Write the hashes of the documents of a task, sorted, each with the document's number in the task."""
    found = (_hash(document) for document in documents(work.plan.tasks[number], work.plan.settings, tally))
    rows = [(high, low, i) for i, (high, low) in enumerate(found)]
    with work.written(SEEN, number) as path:
        np.save(path, np.sort(np.array(rows, _SEEN), order=("high", "low", "document")))


def write_repeated(work: Work, number: int) -> None:
    """Write the documents whose hash is in one of the ranges and was there before, in the order of the corpus."""
    ranges = work.plan.stages[REPEATED]
    edges = np.array([2**64 * number // ranges, 2**64 * (number + 1) // ranges - 1], np.uint64)
    parts = []
    for task in range(work.plan.stages[SEEN]):
        seen = np.load(work.result(SEEN, task), mmap_mode="r")
        first, end = np.searchsorted(seen["high"], edges[0]), np.searchsorted(seen["high"], edges[1], "right")
        parts.append((np.full(end - first, task, np.uint64), np.array(seen[first:end])))
    task_of = np.concatenate([task for task, _ in parts])
    seen = np.concatenate([rows for _, rows in parts])
    order = np.lexsort((seen["document"], task_of, seen["low"], seen["high"]))
    task_of, seen = task_of[order], seen[order]
    again = np.flatnonzero((seen["high"][1:] == seen["high"][:-1]) & (seen["low"][1:] == seen["low"][:-1])) + 1
    repeated = np.empty(len(again), _REPEATED)
    repeated["task"], repeated["document"] = task_of[again], seen["document"][again]
    with work.written(REPEATED, number) as path:
        np.save(path, np.sort(repeated, order=("task", "document")))


def repeated_documents(work: Work, number: int) -> set[int]:
    """The numbers, within a task, of its documents that are to be left out."""
    found: set[int] = set()
    for part in range(work.plan.stages.get(REPEATED, 0)):
        repeated = np.load(work.result(REPEATED, part), mmap_mode="r")
        first, end = (np.searchsorted(repeated["task"], np.uint64(task)) for task in (number, number + 1))
        found.update(repeated["document"][first:end].tolist())
    return found


def _hash(document: Document) -> tuple[int, int]:
    """128 bits of a document's text; those are equal that differ in blanks and in Unicode's spellings of a letter."""
    normal = " ".join(unicodedata.normalize("NFC", document.text).split())
    digest = hashlib.blake2b(normal.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
