"""Reading one file of a corpus: JSONL, Parquet or plain text, compressed or not, here or at any fsspec address."""

from __future__ import annotations

import codecs
import errno
import io
import json
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple, cast

from jaxscale.config.data import BuildConfig

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 2**20
"""Bytes that are asked for at one time."""
DECOMPRESSED = 2**16
"""Bytes that are decompressed at one time; before damage of the file so many may be lost."""
ROWS = 256
"""Rows of Parquet that are in memory as Python objects at one time."""


class CorpusFile(NamedTuple):
    """One file of a corpus; they sort by name."""

    name: str
    """Path below the folder that its glob searches."""
    address: str
    """A local path, or an address for fsspec."""
    size: int
    """Bytes, as stored."""


class Part(NamedTuple):
    """A range of bytes of a file: the lines that start in it. Only plain JSONL is read in parts."""

    file: CorpusFile
    start: int
    end: int


class Entry(NamedTuple):
    """One line, row or file; also tells how much has been read since the entry before."""

    line: int
    """Line or row, counted from 1 at the start of the part."""
    position: int
    """Byte of the (uncompressed) file where it starts; its row, from 0, in Parquet."""
    read: int = 0
    """Bytes of the file, as stored, that were read for it."""
    text: str | None = None
    complaint: str = ""
    """What is wrong with it, where there is no text."""
    blank: bool = False
    """Whether it is a line of nothing but blanks."""
    whole: bool = False
    """Whether it is the only one of its file."""
    fields: Mapping[str, Any] = {}


def entries(part: Part, settings: BuildConfig, fields: frozenset[str]) -> Iterator[Entry]:
    """What is in a part of a file, in order; of Parquet only the columns `fields` are read besides the text.

    What cannot be read is an entry with a complaint; after a damage of the file itself it is the last one. The bytes
    of all entries together are those of the part, unless the file is damaged. Raises OSError where the disk or the
    network fails.
    """
    reader = {"parquet": _rows, "jsonl": _lines, "text": _whole}[_kind(part.file, settings)]
    found, last = False, Entry(0, 0)
    try:
        for last in reader(part, settings, fields):
            found = True
            yield last
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are of these kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk or the network, not of what is in the file
        yield Entry(last.line + 1, last.position, complaint=f"the file is damaged from here on ({error})")
        return
    if not found and part.start == 0 and settings.files:
        yield Entry(1, 0, part.end, complaint="the file is empty")
    elif not found and part.start == 0:  # modules of a standard library may be
        yield Entry(1, 0, part.end, "", whole=True)


def is_splittable(file: CorpusFile, settings: BuildConfig) -> bool:
    """Whether a file can be read from its middle on."""
    return _kind(file, settings) == "jsonl" and _compression(file) is None


def opened(address: str) -> IO[bytes]:
    """A file opened for reading, compressed ones as they are stored; raises OSError."""
    if "://" not in address:
        return open(address, "rb", BUFFER)
    import fsspec

    try:
        return cast(IO[bytes], io.BufferedReader(fsspec.open(address, "rb").open(), BUFFER))
    except Exception as error:  # every file system has its own
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", address) from error


def _kind(file: CorpusFile, settings: BuildConfig) -> str:
    if settings.format is not None:
        return settings.format
    name = file.name.removesuffix(_suffix(file))
    return "jsonl" if name.endswith(".jsonl") else "parquet" if name.endswith(".parquet") else "text"


def _suffix(file: CorpusFile) -> str:
    """The end of a name that says how the file is compressed; "" if it is not."""
    return next((suffix for suffix in COMPRESSIONS if file.name.endswith(suffix)), "")


def _compression(file: CorpusFile) -> str | None:
    return COMPRESSIONS.get(_suffix(file))


def _decompressed(stored: IO[bytes], file: CorpusFile) -> IO[bytes]:
    """What a file holds; reading raises OSError where the compressed stream is cut short or damaged."""
    compression = _compression(file)
    if compression is None:
        return stored
    import pyarrow

    # Of the libraries at hand this one notices a stream that ends early, whatever the compression.
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), compression)
    return cast(IO[bytes], io.BufferedReader(stream, DECOMPRESSED))


def _whole(part: Part, settings: BuildConfig, fields: frozenset[str]) -> Iterator[Entry]:
    """A file that is one document."""
    with opened(part.file.address) as stored:
        content = _decompressed(stored, part.file).read()
    if not content:
        return
    try:
        yield Entry(1, 0, part.end, content.removeprefix(codecs.BOM_UTF8).decode(), whole=True)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Entry(line, 0, part.end, complaint=f"not UTF-8 text ({error.reason})")


def _lines(part: Part, settings: BuildConfig, fields: frozenset[str]) -> Iterator[Entry]:
    """JSONL: one document a line. Of a file in parts, the lines that start in this one."""
    with opened(part.file.address) as stored:
        compressed = _compression(part.file) is not None
        file = _decompressed(stored, part.file)
        position, told = part.start, part.start
        if part.start:
            stored.seek(part.start - 1)
            position += len(stored.readline()) - 1
        number = 0
        while compressed or position < part.end:
            line = file.readline()
            if not line:
                break
            number += 1
            reached = min(stored.tell(), part.end) if compressed else min(position + len(line), part.end)
            entry, position = _line(line, number, position, reached - told, settings.text_field), position + len(line)
            del line  # a long one is not held beside its text
            yield entry
            told = reached
        if (number or part.start) and part.end > told:
            yield Entry(number, position, part.end - told)


def _line(line: bytes, number: int, position: int, read: int, text_field: str) -> Entry:
    content = line if position else line.removeprefix(codecs.BOM_UTF8)
    if not content or content.isspace():
        return Entry(number, position, read, blank=True)
    try:
        fields = _object(content)
        return Entry(number, position, read, _text(fields, text_field, "key"), fields=fields)
    except (ValueError, RecursionError) as error:
        return Entry(number, position, read, complaint=str(error) or type(error).__name__)


def _object(line: bytes) -> Mapping[str, Any]:
    """The object in a line of JSONL; raises ValueError saying what is wrong."""
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(found, dict):
        raise ValueError(f"a JSON {type(found).__name__}, not an object")
    return found


def _text(fields: Mapping[str, Any], text_field: str, kind: str) -> str:
    """The text among the fields; raises ValueError where there is none."""
    if text_field not in fields:
        keys = ", ".join(map(repr, fields)) or "none"
        raise ValueError(f"no {kind} {text_field!r} (data.build.text_field); it has {keys}")
    text = fields[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{text_field!r} is {json.dumps(text, default=str)[:40]}, not a string")
    return text


def _rows(part: Part, settings: BuildConfig, fields: frozenset[str]) -> Iterator[Entry]:
    """Parquet: one document a row."""
    if part.file.size == 0:
        return
    import pyarrow.parquet

    with opened(part.file.address) as stored:
        file = pyarrow.parquet.ParquetFile(stored)
        names = file.schema_arrow.names
        if settings.text_field not in names:
            complaint = f"no column {settings.text_field!r} (data.build.text_field); it has {', '.join(names)}"
            yield Entry(1, 0, part.end, complaint=complaint)
            return
        columns = [name for name in names if name in fields or name == settings.text_field]
        number, rows = 0, file.metadata.num_rows
        for batch in file.iter_batches(ROWS, columns=columns):
            for index in range(batch.num_rows):
                number += 1
                read = part.end * number // rows - part.end * (number - 1) // rows
                try:
                    row = {name: column[index].as_py() for name, column in zip(columns, batch.columns, strict=True)}
                    yield Entry(number, number - 1, read, _text(row, settings.text_field, "column"), fields=row)
                except UnicodeDecodeError as error:
                    yield Entry(number, number - 1, read, complaint=f"not UTF-8 text ({error.reason})")
                except ValueError as error:
                    yield Entry(number, number - 1, read, complaint=str(error))
