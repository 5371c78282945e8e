"""Which files a corpus is, how it is cut into tasks, and which documents are in a part of it.

All of it depends on the files and the settings alone, never on who reads them.
"""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.config.data import BuildConfig
from jaxscale.config.errors import Refused
from jaxscale.config.expression import Expression
from jaxscale.data.build.readers import CorpusFile, Entry, Part, entries, is_splittable
from jaxscale.data.build.tally import MALFORMED, Place, Tally

CHUNK = 2**20
"""Characters whose bytes are counted at one time, so that a long text is not copied for that."""
NOT_LIBRARY = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
"""Folders under the standard library that are not part of the corpus `python-stdlib`; `encodings` is number tables."""

LEAST_TASK, MOST_TASK, TASKS = 2**26, 2**30, 2**10
"""A task is a `TASKS`th of the corpus within these bounds: parallel if that is small, few shards if it is large."""

Task = tuple[Part, ...]
"""What is read, encoded and written as one piece of work."""


class Document(NamedTuple):
    """One text of the corpus."""

    id: str
    """Its source, and where a file holds several its position."""
    source: str
    """The file's path below the folder that its glob searches, or below the standard library: wherever that lies."""
    position: int
    """Where it stands in the file: byte of the (uncompressed) JSONL, row of the Parquet file; 0 for a whole file."""
    place: Place
    text: str
    text_bytes: int
    """Length of the text in UTF-8."""
    fields: Mapping[str, Any]
    """The object that the text stood in, or the columns of Parquet that `data.build.keep` names."""


def corpus_files(settings: BuildConfig) -> list[CorpusFile]:
    """The corpus's files, sorted by name; raises Refused for a glob without a match."""
    if settings.corpus == "python-stdlib":
        return _standard_library()
    found: dict[str, CorpusFile] = {}
    for pattern in settings.files:
        matches = _matches(pattern)
        if not matches:
            raise Refused(f"data.build.files: {pattern!r} matches no file")
        found = {file.address: file for file in matches} | found
    return sorted(found.values())


def tasks(files: Iterable[CorpusFile], settings: BuildConfig) -> list[Task]:
    """Consecutive parts of the corpus of about `data.build.task_bytes`; only plain JSONL is cut inside a file."""
    files = list(files)
    size = settings.task_bytes or min(max(sum(file.size for file in files) // TASKS, LEAST_TASK), MOST_TASK)
    found: list[list[Part]] = []
    room = 0
    for part in (part for file in files for part in _parts(file, size, settings)):
        length = part.end - part.start
        if not found or length > room:
            found.append([])
            room = size
        found[-1].append(part)
        room -= length
    return [tuple(task) for task in found]


def documents(task: Iterable[Part], settings: BuildConfig, tally: Tally) -> Iterator[Document]:
    """The documents of a task, in order, but for those that the filters leave out; `tally` counts what is left out.

    Text is UTF-8; a byte order mark is dropped, the text is otherwise kept as it is. Texts of nothing but blanks are
    no documents. What cannot be read raises Refused with file and line, or is counted where `on_error = "skip"`.
    """
    keep = Expression(settings.keep) if settings.keep is not None else None
    for part in task:
        for entry in entries(part, settings, keep.fields if keep else frozenset()):
            tally.bytes_read += entry.read
            complaint, text = entry.complaint, entry.text
            size = 0
            reason = ""
            if text is not None:
                try:
                    size = sum(len(text[at : at + CHUNK].encode()) for at in range(0, len(text), CHUNK))
                    reason = _reason_to_leave_out(text, entry, settings, keep)
                except ValueError as error:  # half a surrogate pair is no text, and a filter may not be applicable
                    complaint = str(error)
            elif entry.blank:
                reason = "blank line"
            place = Place(part.file.address, part.start, entry.line, complaint)
            if complaint and settings.on_error == "stop":
                raise Refused(f'{place.resolved()}; data.build.on_error = "skip" skips and lists what cannot be read')
            if complaint or reason:
                tally.leave_out(MALFORMED if complaint else reason, place)
            elif text is not None:
                source = part.file.name
                identity = source if entry.whole else f"{source}:{entry.position}"
                yield Document(identity, source, entry.position, place, text, size, entry.fields)


def _reason_to_leave_out(text: str, entry: Entry, settings: BuildConfig, keep: Expression | None) -> str:
    """Why a text is not wanted; "" if it is. Raises ValueError where `keep` cannot be evaluated."""
    if not text or text.isspace():
        return "empty document"
    if len(text) < settings.min_characters:
        return "shorter than min_characters"
    if settings.max_characters is not None and len(text) > settings.max_characters:
        return "longer than max_characters"
    return "keep is not fulfilled" if keep and not keep.holds(entry.fields) else ""


def _parts(file: CorpusFile, size: int, settings: BuildConfig) -> Iterator[Part]:
    """The parts of a file that tasks are made of: ranges of equal length, or the whole file."""
    count = -(-file.size // size) if is_splittable(file, settings) and file.size else 1
    edges = [file.size * i // count for i in range(count + 1)]
    return (Part(file, start, end) for start, end in pairwise(edges))


def _matches(pattern: str) -> list[CorpusFile]:
    """The files that a glob finds."""
    searched = os.path.dirname(re.split(r"[*?[]", pattern, maxsplit=1)[0])
    if "://" not in pattern:
        paths = (path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        return [CorpusFile(path.relative_to(searched).as_posix(), str(path), path.stat().st_size) for path in paths]
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(pattern)
        searched = system._strip_protocol(searched)
        return [
            CorpusFile(name.removeprefix(searched).lstrip("/"), system.unstrip_protocol(name), int(info["size"] or 0))
            for name, info in system.glob(path, detail=True).items()
            if info["type"] == "file"
        ]
    except Exception as error:  # every file system has its own
        raise Refused(f"data.build.files: {pattern!r} cannot be listed ({type(error).__name__}: {error})") from error


def _standard_library() -> list[CorpusFile]:
    """The source files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise Refused(f'data.build.corpus = "python-stdlib": no source files in {root}; set data.build.files instead')
    return sorted(CorpusFile(path.relative_to(root).as_posix(), str(path), path.stat().st_size) for path in found)
