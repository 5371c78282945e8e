"""Small things about files that the data modules share."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that no reader ever sees half of it; parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def claim(path: Path) -> IO[str] | None:
    """Hold the lock file `path` for as long as the returned file is open; None where another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks
        pass
    return file


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file `path`; waits for another process that holds it. The system releases it if the holder dies.

    Gives False, and holds nothing, on a file system without locks (Lustre often is mounted so).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            yield False
        else:
            yield True
