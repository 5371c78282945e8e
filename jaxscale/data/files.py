"""Small things about files that the data modules share."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_folder() -> Path:
    """Where goes what cannot be written beside the data it belongs to; the variable JAXSCALE_CACHE moves it."""
    return Path(os.environ.get("JAXSCALE_CACHE") or Path.home() / ".cache/jaxscale") / "data"


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that no reader ever sees half of it; parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def claim(path: Path) -> IO[str] | None:
    """Hold the lock file `path` for as long as the returned file is open; None where another process holds it.

    On a file system without locks nothing is held.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file `path`; waits for another process that holds it. The system releases it if the holder dies.

    Gives False, and holds nothing, on a file system without locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield _lock(file, fcntl.LOCK_EX)


def _lock(file: IO[str], operation: int) -> bool:
    """Lock an open file; False on a file system without locks (Lustre often is mounted so)."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return False
    return True
