"""Reading token files from end to end: in blocks, in parallel, every byte once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np

from jaxscale.data.progress import Counter, Progress, silent

BLOCK = 2**22
"""Bytes of tokens read at a time, by each thread."""
PIECE = 2**20
"""Entries of an index read at a time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Digest(Protocol):
    """What the bytes of a file go through, such as `hashlib.sha256()`."""

    def update(self, data: bytes | memoryview, /) -> None: ...


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def token_blocks(path: Path, header: int, dtype: str, digest: Digest) -> Iterator[np.ndarray]:
    """The ids behind the first `header` bytes of a file, in order, blocks `[n]` of `dtype`; each overwrites the last.

    The whole file goes through `digest`.
    """
    buffer, width = memoryview(bytearray(BLOCK)), np.dtype(dtype).itemsize
    with open(path, "rb") as file:
        digest.update(file.read(header))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            yield np.frombuffer(buffer, dtype, count // width)


def pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """`[n]`, as of a memory-mapped file, in pieces of at most `PIECE` entries."""
    return (np.asarray(array[at : at + PIECE]) for at in range(0, len(array), PIECE))


def in_parallel(
    work: Callable[[Item, Callable[[int], None]], Result],
    items: Sequence[Item],
    what: str,
    total: int,
    progress: Progress = silent,
) -> list[Result]:
    """`work(item, advance)` of every item, in a thread for each core; results in order.

    `work` reports the bytes it has read to `advance`, which also ends it where the work on another item has failed.
    The error that is raised is that of the first item that failed.
    """
    counter = Counter(progress, what, total)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            return list(pool.map(lambda item: work(item, counter.advance), items))
        finally:
            counter.end()


class EndsWriter:
    """Writes where documents end as an `.npy` file, `[documents] uint64`, piece by piece; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.documents, self.empty = 0, 0, 0
        """The last end; how many documents it closes; and how many of no tokens were left out."""

    def __enter__(self) -> EndsWriter:
        self._file = open(self.path, "w+b")
        self._write_header()
        return self

    def add(self, ends: np.ndarray) -> None:
        """Append ends, `[n]` integers below 2^63. Raises ValueError where they fall."""
        steps = np.diff(ends.astype(np.int64), prepend=self.last)
        if (steps < 0).any():
            raise ValueError("document ends do not rise")
        rising = ends[steps > 0]
        self._file.write(rising.astype(np.uint64).tobytes())
        self.documents += len(rising)
        self.empty += len(ends) - len(rising)
        self.last = int(rising[-1]) if len(rising) else self.last

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """NumPy pads the header so that it keeps its size while the number of documents grows."""
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": "<u8", "fortran_order": False, "shape": (self.documents,)}
        )
