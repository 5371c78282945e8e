"""The documents of a corpus, in an order that depends on the files alone."""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxscale.config.errors import Refused
from jaxscale.config.schema import BuildConfig

NOT_LIBRARY = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
"""Folders under the standard library that are not part of the corpus `python-stdlib`; `encodings` is number tables."""

KEPT_EXAMPLES = 20
"""Malformed lines or files that a tally lists one by one; all are counted."""


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    id: str
    """Its source, and the line for JSONL."""
    source: str
    """The file's path below the folder that its glob searches, or below the standard library: wherever that lies."""
    text: str
    text_bytes: int
    """Length of the text in UTF-8."""


@dataclass
class Tally:
    """What happened while documents were read."""

    bytes_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> lines or files that gave no document: `empty document`, `blank line`, `malformed`."""
    malformed: list[str] = field(default_factory=list)
    """The first malformed ones, each with file, line and what is wrong."""


def corpus_files(settings: BuildConfig) -> list[tuple[str, Path]]:
    """(name, path) of the corpus's files, sorted by name; raises Refused for a glob without a match."""
    if settings.corpus == "python-stdlib":
        return _standard_library()
    names: dict[Path, str] = {}
    for pattern in settings.files:
        found = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]
        if not found:
            raise Refused(f"data.build.files: {pattern!r} matches no file")
        searched = os.path.dirname(re.split(r"[*?[]", pattern, maxsplit=1)[0])
        for path in found:
            names.setdefault(path, path.relative_to(searched).as_posix())
    return sorted((name, path) for path, name in names.items())


def documents(settings: BuildConfig, tally: Tally | None = None) -> Iterator[Document]:
    """The documents of the corpus.

    A `.jsonl` file holds one a line, any other file is one, always UTF-8; a byte order mark is dropped, the text is
    otherwise kept as it is. Texts of nothing but blanks give no document, and are counted. What cannot be read raises
    Refused with file and line, or is counted where `malformed = "skip"`.
    """
    tally = tally or Tally()
    for name, path in corpus_files(settings):
        read = _lines(name, path, settings.text_field) if path.suffix == ".jsonl" else _whole(name, path)
        for size, found in read:
            tally.bytes_read += size
            if isinstance(found, Document):
                yield found
            elif isinstance(found, _Malformed):
                if settings.malformed == "refuse":
                    raise Refused(f'{found.where}; data.build.malformed = "skip" skips and counts what cannot be read')
                tally.skipped["malformed"] += 1
                if len(tally.malformed) < KEPT_EXAMPLES:
                    tally.malformed.append(found.where)
            else:
                tally.skipped[found] += 1


@dataclass(frozen=True)
class _Malformed:
    where: str
    """File, line, and what is wrong."""


_Found = tuple[int, Document | _Malformed | str]
"""Bytes consumed, and a document, something malformed, or the reason why there is no document."""


def _whole(name: str, path: Path) -> Iterator[_Found]:
    """A file that is one document."""
    content = path.read_bytes()
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
        yield len(content), _document(name, name, text)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield len(content), _Malformed(f"{path}:{line}: not UTF-8 text ({error.reason})")


def _lines(name: str, path: Path, text_field: str) -> Iterator[_Found]:
    """A JSONL file: one document a line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not content.strip():
                yield len(line), "blank line"
                continue
            try:
                yield len(line), _document(f"{name}:{number}", name, _text_of(content, text_field))
            except (ValueError, RecursionError) as error:
                yield len(line), _Malformed(f"{path}:{number}: {error}")


def _text_of(line: bytes, text_field: str) -> str:
    """The text in a line of JSONL; raises ValueError saying what is wrong."""
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__}, not an object")
    if text_field not in entry:
        keys = ", ".join(map(repr, entry)) or "none"
        raise ValueError(f"no key {text_field!r} (data.build.text_field); it has {keys}")
    text = entry[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{text_field!r} is {json.dumps(text)[:40]}, not a string")
    return text


def _document(identity: str, source: str, text: str) -> Document | str:
    """The document, unless it is empty; raises ValueError for a text that is not Unicode (half a surrogate pair)."""
    return Document(identity, source, text, len(text.encode())) if text.strip() else "empty document"


def _standard_library() -> list[tuple[str, Path]]:
    """The source files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise Refused(f'data.build.corpus = "python-stdlib": no source files in {root}; set data.build.files instead')
    return sorted((path.relative_to(root).as_posix(), path) for path in found)
