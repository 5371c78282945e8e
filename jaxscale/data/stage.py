"""Copying token datasets to a disk of this machine: once for all its processes, and for later runs.

ROOT/dataset-FINGERPRINT/          a whole copy, a token dataset like any other
ROOT/.dataset-FINGERPRINT.part/    one that is being made; what has its own name in it is finished and verified
ROOT/.dataset-FINGERPRINT.lock     held by who makes or removes the copy, shared by all who use it; the time of its
                                   last change is when the copy was last asked for
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from http.client import HTTPException, HTTPResponse
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from jaxscale.config.errors import Fault, Refused
from jaxscale.data.files import claim
from jaxscale.data.manifest import MANIFEST, Shard
from jaxscale.data.progress import Counter, Progress, silent
from jaxscale.data.relay import ALONE, Above, Tree, served
from jaxscale.data.store import TokenDataset

BLOCK = 2**22
"""Bytes that a stream reads at a time."""
BESIDE_SHARDS = ("tokenizer.json", "documents-*.parquet", "packing-*/*")
"""Further files of a dataset's folder: its tokenizer, where the documents come from, packing plans."""
UNFINISHED = ".part"
"""At the end of the names of files that are being copied."""
PATIENCE = 300
"""Tenths of a second to wait for processes that hold on to a copy that is not whole."""
MARGIN = 2**16
"""Bytes that must be free beyond the files' own, for the manifest and folders."""


class File(NamedTuple):
    """One file of a dataset."""

    source: Path
    name: str
    """Its path in the copy."""
    size: int
    """Bytes."""
    sha256: str | None
    """Of its content, where the dataset's manifest says so."""


def stage(
    source: Path,
    destination_root: Path,
    *,
    limit_bytes: int | None = None,
    streams: int = 4,
    tokenizer: str | None = None,
    tree: Tree = ALONE,
    progress: Progress = silent,
) -> Path:
    """The folder below `destination_root` of a whole copy of the dataset `source`; made unless it is there.

    Each file is held against the manifest's sha256 on its way, `streams` files at a time. A copy that broke off goes on
    after the files that were finished. Of several processes one copies and the others wait. The copy counts as in use
    until this process ends.

    Args:
        limit_bytes: what the copies below `destination_root` may take together. For it, and for space on the disk,
            copies that are not in use are removed, first the one that was not asked for longest. None: none ever is.
        tokenizer: as in `TokenDataset.open`.
        tree: ask the host above this one for the files, and pass them on to those below, until those have theirs.

    Raises:
        Refused: the source is not whole or not what its manifest says, or there is no room for the copy.
        Fault: a file could not be read or written; called again, it goes on.
    """
    dataset = TokenDataset.open(source, tokenizer, progress)
    copy = destination_root / f"dataset-{dataset.fingerprint[:24]}"
    try:
        destination_root.mkdir(parents=True, exist_ok=True)
        lock = os.open(_lock_of(copy), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise Refused(f"{destination_root}: nothing can be staged there: {error}") from error
    make = partial(_make, dataset, copy, limit_bytes, streams, tree, progress)
    try:
        names = [file.name for file in _files(dataset)]
        with served(tree, dataset.fingerprint, _folders_of(_lock_of(copy)), names):
            _stage(dataset, copy, lock, make)
            Above(tree, dataset.fingerprint).say_done()
    except BaseException:
        os.close(lock)
        raise
    return copy  # the lock's descriptor stays open, so that the lock lasts as long as the process


def _stage(dataset: TokenDataset, copy: Path, lock: int, make: Callable[[], None]) -> None:
    """Return with a shared lock on a whole copy; whoever has the lock alone makes it."""
    for _ in range(PATIENCE):
        fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a process that copies
        if _is_whole(copy, dataset):
            os.utime(lock)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)  # others want to copy too
        else:
            if not _is_whole(copy, dataset):
                make()
    raise Fault(f"{copy}: files of it are missing, but other processes still use it; it can be made again after them")


def _make(
    dataset: TokenDataset,
    copy: Path,
    limit_bytes: int | None,
    streams: int,
    tree: Tree,
    progress: Progress,
) -> None:
    """Make the copy, or what is missing of it."""
    dataset.tokenizer()  # the manifest has no checksum of its file
    (_, part), files = _folders_of(_lock_of(copy)), _files(dataset)
    try:
        if copy.exists():  # but damaged: somebody removed or cut some of its files
            shutil.rmtree(part, ignore_errors=True)
            copy.rename(part)
        part.mkdir(exist_ok=True)
        for unfinished in part.rglob(f"*{UNFINISHED}"):
            unfinished.unlink()
        missing = [file for file in files if not _is_finished(part / file.name, file.size)]
        _make_room(copy, files, missing, limit_bytes)
        above = Above(tree, dataset.fingerprint)
        _copy_all(missing, part, streams, above, f"staging {dataset.path}", progress)
        (part / MANIFEST).write_text(_manifest(dataset))
        TokenDataset.open(part)
        part.rename(copy)
    except OSError as error:
        raise Fault(f"{copy}: staging broke off: {error}; the same command goes on with it") from error


def _files(dataset: TokenDataset) -> list[File]:
    """All files but the manifest: those of the shards, then what lies beside them."""
    files = []
    for shard, copied in zip(dataset.shards, _copied_shards(dataset), strict=True):
        tokens, documents = (dataset.folder / name for name in (shard.tokens_file, shard.documents_file))
        files += [
            File(tokens, copied.tokens_file, shard.tokens_bytes, shard.tokens_sha256),
            File(documents, copied.documents_file, shard.documents_bytes, shard.documents_sha256),
        ]
    for pattern in BESIDE_SHARDS:
        for path in sorted(dataset.folder.glob(pattern)):
            files.append(File(path, str(path.relative_to(dataset.folder)), path.stat().st_size, None))
    return files


def _copied_shards(dataset: TokenDataset) -> list[Shard]:
    """The shards as the copy's manifest lists them: token files of other programs lie beside it, under new names."""
    return [
        replace(shard, tokens_file=f"{number:05d}-{path.name}") if path.is_absolute() else shard
        for number, shard in enumerate(dataset.shards)
        for path in [Path(shard.tokens_file)]
    ]


def _manifest(dataset: TokenDataset) -> str:
    """The copy's manifest."""
    content = json.loads((dataset.folder / MANIFEST).read_bytes())
    return json.dumps({**content, "shards": [asdict(shard) for shard in _copied_shards(dataset)]}, indent=1) + "\n"


def _make_room(copy: Path, files: Sequence[File], missing: Sequence[File], limit_bytes: int | None) -> None:
    """Remove copies not in use, as many as the limit and the disk need; raises Refused where that is not enough."""
    root, size = copy.parent, sum(file.size for file in files)
    free, block = shutil.disk_usage(root).free, os.statvfs(root).f_frsize
    needed = sum(-(-file.size // block) * block for file in missing) + MARGIN
    others = sorted((lock for lock in root.glob(".dataset-*.lock") if lock != _lock_of(copy)), key=_last_asked_for)
    sizes = {lock: sum(map(_size, _folders_of(lock))) for lock in others}
    taken = size + sum(sizes.values())

    def obstacle(removed: int) -> str | None:
        if limit_bytes is not None and taken - removed > limit_bytes:
            return f"staged there would be {decimal(taken - removed)} with it, and the limit is {decimal(limit_bytes)}"
        if needed > free + removed:
            return f"it needs {decimal(needed)}, and {decimal(free + removed)} can be had"
        return None

    with ExitStack() as claims:
        unused = []
        for lock in others if limit_bytes is not None else []:
            if held := claim(lock):
                claims.enter_context(held)
                unused.append(lock)
        if complaint := obstacle(sum(sizes[lock] for lock in unused)):
            raise Refused(f"{root}: there is no room for {copy.name}: {complaint}")
        removed = 0
        for lock in unused:
            if obstacle(removed):
                removed += sizes[lock]
                for folder in _folders_of(lock):
                    shutil.rmtree(folder, ignore_errors=True)


def _copy_all(files: Sequence[File], folder: Path, streams: int, above: Above, what: str, progress: Progress) -> None:
    """Copy files, so many at a time; if one fails, the others end too."""
    counter = Counter(progress, what, sum(file.size for file in files))
    with ThreadPoolExecutor(streams) as pool:
        copies = [pool.submit(_copy_file, file, folder / file.name, above, counter.advance) for file in files]
        try:
            for copied in as_completed(copies):
                copied.result()
        finally:
            counter.end()
            pool.shutdown(cancel_futures=True)


def _copy_file(file: File, target: Path, above: Above, advance: Callable[[int], None]) -> None:
    """Copy one file, which has its name only when it is on the disk and verified."""
    unfinished, received = target.with_name(target.name + UNFINISHED), False
    try:
        target.parent.mkdir(exist_ok=True)
        if response := above.open(file.name):
            with response, suppress(OSError, HTTPException):
                received = _receive(file, response, unfinished, advance)
        if not received:
            with open(file.source, "rb", buffering=0) as source:
                received = _receive(file, source, unfinished, advance)
        if not received:
            raise Refused(f"{file.source}: its content is not what {MANIFEST} says (sha256 differs)")
        unfinished.rename(target)
    except OSError as error:
        reason = f"{file.source} cannot be copied to {target}: {error.strerror}"
        raise Fault(f"{reason}; what is copied already is kept, the same command goes on with it") from error


def _receive(file: File, stream: RawIOBase | HTTPResponse, target: Path, advance: Callable[[int], None]) -> bool:
    """Write a file's content to the disk; whether it is what it should be."""
    sums, buffer = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open(target, "wb") as copy:
        while count := stream.readinto(buffer):
            sums.update(buffer[:count])
            copy.write(buffer[:count])
            advance(count)
        copy.flush()
        os.fsync(copy.fileno())
        return file.size == copy.tell() and file.sha256 in (None, sums.hexdigest())


def _is_whole(copy: Path, dataset: TokenDataset) -> bool:
    """Whether a copy is there, with all its files in their full size."""
    try:
        found = TokenDataset.find(copy)
    except Refused:
        return False
    tokenizer = dataset.built_in_tokenizer or (copy / "tokenizer.json").is_file()
    return found is not None and found.fingerprint == dataset.fingerprint and tokenizer


def _is_finished(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _lock_of(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.lock")


def _folders_of(lock: Path) -> tuple[Path, Path]:
    """The copy that a lock is for, and where it is made."""
    name = lock.name.removesuffix(".lock")
    return lock.with_name(name.removeprefix(".")), lock.with_name(f"{name}.part")


def _last_asked_for(lock: Path) -> tuple[int, str]:
    """What to sort copies by; those of one moment by name."""
    return lock.stat().st_mtime_ns, lock.name


def _size(folder: Path) -> int:
    """Bytes of all files in a folder, which need not be there."""
    return sum(os.stat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names)
