"""Token files of other programs: which they are, where in them the ids lie, and where their documents end.

Read are, as their public descriptions and writers define them:

    Megatron-LM     PREFIX.bin holds ids, PREFIX.idx which of them make a sequence and which sequences a document
    datatrove       NAME.ds holds ids, NAME.ds.index where documents end (uint64), NAME.ds.metadata the width of an id
    llm.c           NAME.bin: 256 int32 of header, then ids
    flat            NAME.bin: nothing but ids, as nanoGPT writes them
"""

from __future__ import annotations

import glob
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data.scan import pieces

FLAT, LLM_C, MEGATRON, DATATROVE = (
    "flat token file (.bin)",
    "llm.c token file (.bin with a header)",
    "Megatron-LM (.bin, .idx)",
    "datatrove (.ds)",
)
READABLE = "Megatron-LM .bin with .idx, datatrove .ds, llm.c .bin and flat .bin of uint16 or uint32"

LLM_C_HEADER = struct.Struct("<256i")
LLM_C_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Magic number, the first of the header -> version, the second, and width of an id. The third is the number of ids."""
LLM_C_EVALUATION = 20240522
"""Magic number of its files of multiple-choice questions."""

MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the ids' dtype, number of sequences, number of document indices (documents + 1)."""
MEGATRON_MAGIC, MEGATRON_VERSION = b"MMIDIDX\0\0", 1
MEGATRON_DTYPES = {4: "uint32", 8: "uint16"}
"""Codes that are read. Code 4 is int32, whose ids are not negative, so that it reads as uint32."""


@dataclass(frozen=True)
class TokenFile:
    """One file of ids."""

    path: Path
    header: int
    """Bytes before the first id."""
    dtypes: tuple[str, ...]
    """What the ids are; both where it is written nowhere and has to be found out."""
    ends: Callable[[], Iterator[np.ndarray]] | None
    """Reads where documents end, in pieces `[n]` of integers; None: nowhere but in the markers among the ids."""
    described_by: tuple[Path, ...] = ()
    """The files beside it that say all this."""


@dataclass(frozen=True)
class TokenFiles:
    """Token files that make one dataset."""

    format: str
    files: tuple[TokenFile, ...]


def recognise(path: Path) -> TokenFiles:
    """What the token files are that `path` names: a file, a pattern with `*`, a folder of `.ds` files, or the common
    prefix of a `.bin` and an `.idx`.

    Headers and sizes are read, and held against each other. Raises Refused, naming the file, for anything else.
    """
    if not (files := named(path)):
        binary = path.is_dir() and any(path.glob("*.bin"))
        hint = f"; token files of other programs are named one by one or as {path / '*.bin'}" if binary else ""
        raise Refused(f"{path}: not a token dataset (no dataset.json); `jaxscale data build` makes one{hint}")
    found = dict(_recognise(file) for file in files)
    kinds = {format for _, format in found.values()}
    if len(kinds) > 1:
        raise Refused(f"{path}: files of several kinds: {', '.join(sorted(kinds))}; name those of one kind")
    filled = tuple(file for file, _ in found.values() if _size(file.path) > file.header)
    if not filled:
        raise Refused(f"{path}: holds no tokens")
    return TokenFiles(kinds.pop(), filled)


def named(path: Path) -> list[Path]:
    """The files that `path` stands for (see `recognise`), in the order of their names; none if there are none."""
    if path.is_dir():
        return sorted(path.glob("*.ds"))
    index = path.with_name(path.name + ".idx")
    one = next((file for file in (path, index) if file.is_file()), None)
    return [one] if one else sorted(map(Path, glob.glob(str(path))))


def _recognise(path: Path) -> tuple[Path, tuple[TokenFile, str]]:
    """The file with the ids that `path` belongs to, opened, and its format."""
    tokens = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if tokens.suffix == ".ds":
        return tokens, (_datatrove(tokens), DATATROVE)
    if tokens.suffix != ".bin":
        raise Refused(f"{path}: no token file that is known here; read are {READABLE}")
    if path.suffix == ".idx" or tokens.with_suffix(".idx").is_file():
        return tokens, (_megatron(tokens), MEGATRON)
    header = _head(tokens, LLM_C_HEADER.size)
    magic = int.from_bytes(header[:4], "little")
    if magic == LLM_C_EVALUATION:
        raise Refused(f"{tokens}: multiple-choice questions of llm.c, not tokens to train on")
    if magic in LLM_C_KINDS and len(header) == LLM_C_HEADER.size:
        return tokens, (_llm_c(tokens, LLM_C_HEADER.unpack(header)), LLM_C)
    return tokens, (_flat(tokens), FLAT)


def _flat(path: Path) -> TokenFile:
    size = _size(path)
    if size % 2:
        raise Refused(f"{path}: {size} bytes, which is no whole number of uint16 or uint32 ids")
    return TokenFile(path, 0, ("uint32", "uint16"), None)


def _llm_c(path: Path, header: tuple[int, ...]) -> TokenFile:
    magic, found, count = header[:3]
    version, dtype = LLM_C_KINDS[magic]
    if found != version:
        raise Refused(f"{path}: version {found} of the llm.c format of {dtype} ids; read is version {version}")
    _expect(path, LLM_C_HEADER.size + count * np.dtype(dtype).itemsize, f"its header says {count} {dtype} ids")
    return TokenFile(path, LLM_C_HEADER.size, (dtype,), None)


def _datatrove(path: Path) -> TokenFile:
    index, metadata, losses = (path.with_name(path.name + ending) for ending in (".index", ".metadata", ".loss"))
    if losses.exists():
        raise Refused(f"{losses}: losses of single tokens are not read; move it away to train on every token")
    size, dtypes, ends = _size(path), _flat(path).dtypes, None
    if metadata.is_file():
        try:
            tokenizer, tokens = metadata.read_text().splitlines()[:2]
            dtypes = ({"2": "uint16", "4": "uint32"}[tokenizer.rpartition("|")[2]],)
            wanted = int(tokens) * np.dtype(dtypes[0]).itemsize
        except (ValueError, KeyError) as error:
            raise Refused(f"{metadata}: does not say how many tokens there are and how wide: {error}") from error
        _expect(path, wanted, f"{metadata.name} says {tokens} {dtypes[0]} ids")
    if index.is_file():
        count, rest = divmod(_size(index), 8)
        last = int(np.fromfile(index, "<u8", 1, offset=8 * (count - 1))[0]) if count else 0
        dtypes = tuple(dtype for dtype in dtypes if last * np.dtype(dtype).itemsize == size)
        if rest or not dtypes:
            raise Refused(f"{index}: its last document ends at token {last}, but {path.name} has {size} bytes")
        ends = partial(pieces, np.memmap(index, "<u8", "r")) if count else None
    there = tuple(file for file in (index, metadata) if file.is_file())
    return TokenFile(path, 0, dtypes, ends, there)


def _megatron(path: Path) -> TokenFile:
    index = path.with_suffix(".idx")
    header = _head(index, MEGATRON_HEADER.size)
    if len(header) < MEGATRON_HEADER.size or not header.startswith(MEGATRON_MAGIC):
        raise Refused(f"{index}: no index of Megatron-LM (it does not begin with {MEGATRON_MAGIC!r})")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(header)
    if version != MEGATRON_VERSION:
        raise Refused(f"{index}: version {version} of Megatron-LM's index; read is version {MEGATRON_VERSION}")
    if code not in MEGATRON_DTYPES:
        raise Refused(f"{index}: its ids have the dtype with the code {code}; read are 4 (int32) and 8 (uint16)")
    lengths_at = MEGATRON_HEADER.size
    starts_at = lengths_at + 4 * sequences
    documents_at = starts_at + 8 * sequences
    said = f"its header says {sequences} sequences and {documents} document indices"
    _expect(index, documents_at + 8 * documents, said)
    if not sequences or not documents:
        _expect(path, 0, said)
        return TokenFile(path, 0, (MEGATRON_DTYPES[code],), None, (index,))
    lengths = np.memmap(index, "<i4", "r", lengths_at, sequences)
    starts = np.memmap(index, "<i8", "r", starts_at, sequences)
    first_sequences = np.memmap(index, "<i8", "r", documents_at, documents)
    width = np.dtype(MEGATRON_DTYPES[code]).itemsize
    _expect(path, int(starts[-1]) + int(lengths[-1]) * width, f"the last sequence of {index.name} ends there")
    ends = partial(_megatron_ends, index, lengths, starts, first_sequences, width)
    return TokenFile(path, 0, (MEGATRON_DTYPES[code],), ends, (index,))


def _megatron_ends(
    index: Path, lengths: np.ndarray, starts: np.ndarray, first_sequences: np.ndarray, width: int
) -> Iterator[np.ndarray]:
    """Where documents end, in pieces, from the length and first byte of each sequence and each document's first one."""
    total = 0
    for length, start in zip(pieces(lengths), pieces(starts), strict=True):
        expected = np.cumsum([total, *(length.astype(np.int64) * width)])
        if (length < 0).any() or not np.array_equal(start, expected[:-1]):
            raise Refused(f"{index}: its sequences do not lie end to end in the file of ids")
        total = int(expected[-1])
    if first_sequences[0] != 0 or first_sequences[-1] != len(lengths):
        raise Refused(f"{index}: its documents do not hold all {len(lengths)} sequences")
    for first in pieces(first_sequences[1:]):
        if not ((first >= 0) & (first <= len(lengths))).all():
            raise Refused(f"{index}: a document ends at a sequence that is not there")
        inside = np.minimum(first, len(lengths) - 1)
        yield np.where(first < len(lengths), starts[inside], total) // width


def _head(path: Path, count: int) -> bytes:
    """The first bytes of a file, at most `count`."""
    _size(path)
    with open(path, "rb") as file:
        return file.read(count)


def _size(path: Path) -> int:
    if not path.is_file():
        raise Refused(f"{path}: missing")
    return path.stat().st_size


def _expect(path: Path, size: int, why: str) -> None:
    if _size(path) != size:
        raise Refused(f"{path}: {_size(path)} bytes, but must be {size}: {why}")
