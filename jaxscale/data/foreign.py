"""Token files of other programs as token datasets, read where they lie.

What has to be known about them (counts, the largest id, checksums, where documents end) is found in one pass over the
files and kept as a dataset in the cache folder: a manifest whose shards are those files, and the documents' ends. It
is found again by the files' absolute paths, sizes and times of change, and by the tokenizer. Nothing is written beside
the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data.files import cache_folder, locked
from jaxscale.data.formats import TokenFile, TokenFiles, recognise
from jaxscale.data.manifest import MANIFEST, VERSION, Shard, manifest_text
from jaxscale.data.progress import Progress, silent
from jaxscale.data.scan import BLOCK, EndsWriter, file_sha256, in_parallel, token_blocks
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer


class Found(NamedTuple):
    """Token files, the tokenizer to read them with, and the folder in the cache folder that is theirs."""

    path: Path
    files: TokenFiles
    tokenizer: Tokenizer
    folder: Path


class Scanned(NamedTuple):
    """What a pass over a file of tokens finds."""

    shard: Shard
    largest: int
    """The largest id."""
    empty: int
    """Documents without tokens, which are left out."""


def known(path: Path, tokenizer: str | None) -> Path | None:
    """The folder that `adopt` has made for these files; None if it has not yet. Raises Refused as `adopt` does."""
    with _refused(path):
        folder = _find(path, tokenizer).folder
        return folder if (folder / MANIFEST).is_file() else None


def adopt(path: Path, tokenizer: str | None, progress: Progress = silent) -> Path:
    """The folder of the dataset that stands for the token files `path` (see `recognise`); made at first use.

    `tokenizer` is `bytes` or the path of a `tokenizer.json`; unset, the `tokenizer.json` beside the files. One process
    reads the files while others wait. Where a format does not say where documents end, they end after each end marker
    and before each begin marker. Where it does not say how wide ids are, they are uint32 if then all are ids of the
    tokenizer, else uint16 (of a tokenizer with more than 2^16 ids always uint32).

    Raises Refused, naming the file, where the files are damaged, hold ids that the tokenizer does not have, or there is
    no tokenizer, and where the cache folder cannot be written.
    """
    with _refused(path):
        found = _find(path, tokenizer)
        if not (found.folder / MANIFEST).is_file():
            with locked(found.folder.with_name(f".{found.folder.name}.lock")) as alone:
                if not (found.folder / MANIFEST).is_file():
                    _make(found, alone, progress)
        return found.folder


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """What the system does not allow is told without a traceback."""
    try:
        yield
    except OSError as error:
        where = f"cache folder {cache_folder()}; the environment variable JAXSCALE_CACHE names another"
        raise Refused(f"{path}: {error} ({where})") from error


def _find(path: Path, tokenizer: str | None) -> Found:
    files = recognise(path)
    beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if tokenizer is None and not beside.is_file():
        raise Refused(
            f"{path}: token files of another program ({files.format}), which do not say what their ids mean; "
            f"set data.tokenizer (of `data inspect` and `data verify`: --tokenizer) to the tokenizer.json or 'bytes' "
            f"that they were made with, or put it there as {beside}"
        )
    loaded = load_tokenizer(tokenizer or str(beside))
    paths = [Path(os.path.abspath(name)) for file in files.files for name in (file.path, *file.described_by)]
    states = [(str(name), name.stat().st_size, name.stat().st_mtime_ns) for name in paths]
    key = json.dumps([VERSION, files.format, states, loaded.fingerprint])
    name = re.sub(r"[^\w-]+", "_", path.stem)[:60] + "-" + hashlib.sha256(key.encode()).hexdigest()[:24]
    return Found(path, files, loaded, cache_folder() / name)


def _make(found: Found, alone: bool, progress: Progress) -> None:
    """Scan the files and put the folder into place at once. `alone`: no other process does so; what killed ones of this
    host left is removed.
    """
    unfinished = f".{found.folder.name}.{platform.node()}-"
    if alone:
        for left in found.folder.parent.glob(f"{unfinished}*"):
            shutil.rmtree(left, ignore_errors=True)
    making = found.folder.with_name(f"{unfinished}{os.getpid()}")
    making.mkdir()
    try:
        dtype, scanned = _scan(found, making, progress)
        found.tokenizer.save(making / "tokenizer.json")
        built = {
            "format": found.files.format,
            "path": os.path.abspath(found.path),
            "largest_id": max(scan.largest for scan in scanned),
            "empty_documents": sum(scan.empty for scan in scanned),
        }
        shards = [scan.shard for scan in scanned]
        (making / MANIFEST).write_text(manifest_text(found.tokenizer, dtype, shards, None, built))
        try:
            making.rename(found.folder)
        except OSError:
            if not (found.folder / MANIFEST).is_file():  # else, without locks, another process was faster
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _scan(found: Found, making: Path, progress: Progress) -> tuple[str, Sequence[Scanned]]:
    """The ids' dtype, and what is in the files, whose documents' ends are written to the folder `making`."""
    files, vocabulary = found.files.files, found.tokenizer.vocabulary_size
    total = sum(file.path.stat().st_size for file in files)
    dtypes = _dtypes(files, vocabulary)
    if not dtypes:
        raise Refused(f"{found.path}: some files have uint16 ids and some uint32; name those of one kind")
    for dtype in dtypes:
        work = partial(_scan_file, dtype=dtype, tokenizer=found.tokenizer, making=making)
        scanned = in_parallel(work, list(enumerate(files)), f"reading {found.path}", total, progress)
        worst = max(scanned, key=lambda scan: scan.largest)
        if worst.largest < vocabulary:
            return dtype, scanned
    raise Refused(
        f"{worst.shard.tokens_file}: read as {dtype}, its largest id is {worst.largest}, "
        f"but the tokenizer has only the ids 0 to {vocabulary - 1}"
    )


def _dtypes(files: Sequence[TokenFile], vocabulary: int) -> list[str]:
    """What the ids of all files can be, by what is written of them, their sizes and the first ids; likelier first."""
    dtypes = [dtype for dtype in ("uint32", "uint16") if all(dtype in file.dtypes for file in files)]
    if len(dtypes) < 2:
        return dtypes
    odd = next((file.path for file in files if file.path.stat().st_size % 4), None)
    if vocabulary > 2**16:  # nobody writes such ids as uint16, and any file could be read so
        if odd is not None:
            raise Refused(f"{odd}: no whole number of uint32 ids, which a tokenizer of {vocabulary} ids needs")
        return ["uint32"]
    first = np.fromfile(files[0].path, "uint32", BLOCK // 4)
    return ["uint16"] if odd is not None or first.max() >= vocabulary else dtypes


def _scan_file(
    numbered: tuple[int, TokenFile],
    advance: Callable[[int], None],
    dtype: str,
    tokenizer: Tokenizer,
    making: Path,
) -> Scanned:
    number, file = numbered
    size, sums, position, largest = file.path.stat().st_size, hashlib.sha256(), 0, 0
    documents = making / f"documents-{number:05d}.npy"
    try:
        with EndsWriter(documents) as ends:
            for block in token_blocks(file.path, file.header, dtype, sums):
                advance(block.nbytes)
                largest = max(largest, int(block.max()))
                if file.ends is None:
                    ends.add(position + _marked_ends(block, tokenizer))
                position += len(block)
            for piece in file.ends() if file.ends else [np.array([position])]:
                ends.add(piece)
    except ValueError as error:
        raise Refused(f"{file.path}: {error}") from error
    if ends.last != position or size != file.header + position * np.dtype(dtype).itemsize:
        raise Refused(f"{file.path}: holds {position} tokens, but its documents end at {ends.last}")
    shard = Shard(
        tokens_file=os.path.abspath(file.path),
        tokens=position,
        tokens_bytes=size,
        tokens_sha256=sums.hexdigest(),
        documents_file=documents.name,
        documents=ends.documents,
        documents_bytes=documents.stat().st_size,
        documents_sha256=file_sha256(documents),
    )
    return Scanned(shard, largest, ends.empty if file.ends else 0)


def _marked_ends(block: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Where documents end in a block of ids, `[n] int64`: after each end marker and before each begin marker."""
    between = np.zeros(len(block) + 1, bool)
    between[1:] = block == tokenizer.end_id
    if tokenizer.begin_id is not None and tokenizer.begin_id != tokenizer.end_id:
        between[:-1] |= block == tokenizer.begin_id
    return np.flatnonzero(between)
