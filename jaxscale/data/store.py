"""The token dataset on disk: a manifest, and shards that any NumPy user can open.

    dataset.json          what is in it, how it was built, size and sha256 of every shard file
    tokenizer.json        a copy of the tokenizer, unless it is the built-in `bytes`
    tokens-00000.npy      [tokens] uint16 or uint32: the documents of the shard, end to end, with their markers
    documents-00000.npy   [documents] uint64: where each document of the shard ends, counted from the shard's start

A document never spans shards. A dataset appears under its name only when it is complete, and is never changed after.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer

MANIFEST = "dataset.json"
FORMAT = "jaxscale token dataset"
VERSION = 1
PADDING_ROW = -1
"""Row index that `gather` fills with padding: length 0, all ids 0."""


@dataclass(frozen=True)
class Shard:
    """One pair of shard files, as the manifest lists it."""

    tokens_file: str
    tokens: int
    tokens_bytes: int
    tokens_sha256: str
    documents_file: str
    documents: int
    documents_bytes: int
    documents_sha256: str


class Rows(NamedTuple):
    """Rows cut from the documents laid end to end."""

    tokens: np.ndarray
    """`[rows, sequence] int32`: stored ids, 0 where padded."""
    starts: np.ndarray
    """`[rows, sequence] bool`: True where a document begins."""
    lengths: np.ndarray
    """`[rows] int32`: number of real tokens; padding is at the end only."""


class DocumentSpan(NamedTuple):
    """The part of a document that lies in a row."""

    document: int
    """Index of the document in the dataset."""
    first: int
    """Position in the document of the row's first token of it."""
    last: int
    """Position in the document of the row's last token of it."""
    tokens: int
    """Length of the whole document."""


@dataclass(frozen=True)
class TokenDataset:
    """A token dataset opened for reading; the files are memory-mapped when first touched."""

    folder: Path
    documents: int
    tokens: int
    text_bytes: int
    """Bytes of UTF-8 text that were encoded: the denominator of bits per byte."""
    vocabulary_size: int
    end_id: int
    begin_id: int | None
    mask_id: int | None
    dtype: str
    shards: tuple[Shard, ...]
    tokenizer_fingerprint: str
    built_in_tokenizer: bool
    built: dict[str, Any] = field(compare=False)
    """How it was built."""
    _maps: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def find(folder: Path) -> TokenDataset | None:
        """The dataset in `folder`, opened; None if none has been built there yet. Raises Refused as `open` does."""
        return TokenDataset.open(folder) if (folder / MANIFEST).is_file() else None

    @staticmethod
    def open(folder: Path) -> TokenDataset:
        """Open the dataset in `folder`.

        Raises Refused, naming the file, for anything missing, cut short or of another kind. Sizes and headers are
        checked here, contents only by `verify`.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise Refused(f"{folder}: not a token dataset (no {MANIFEST}); `jaxscale data build` makes one")
        try:
            manifest = json.loads(path.read_bytes())
            kind, version = manifest["format"], manifest["version"]
            if (kind, version) != (FORMAT, VERSION):
                raise Refused(f"{path}: {kind!r} version {version}; this jaxscale reads {FORMAT!r} version {VERSION}")
            tokenizer = manifest["tokenizer"]
            dataset = TokenDataset(
                folder=folder,
                documents=manifest["documents"],
                tokens=manifest["tokens"],
                text_bytes=manifest["text_bytes"],
                vocabulary_size=tokenizer["vocabulary_size"],
                end_id=tokenizer["end_id"],
                begin_id=tokenizer["begin_id"],
                mask_id=tokenizer["mask_id"],
                dtype=manifest["dtype"],
                shards=tuple(Shard(**shard) for shard in manifest["shards"]),
                tokenizer_fingerprint=tokenizer["fingerprint"],
                built_in_tokenizer=tokenizer["built_in"],
                built=manifest["built"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path}: damaged manifest ({type(error).__name__}: {error})") from error
        if dataset.dtype not in ("uint16", "uint32"):
            raise Refused(f"{path}: dtype {dataset.dtype!r}; allowed: uint16, uint32")
        for counted, name in ((dataset.tokens, "tokens"), (dataset.documents, "documents")):
            if counted != sum(getattr(shard, name) for shard in dataset.shards):
                raise Refused(f"{path}: damaged manifest (its shards do not add up to {counted} {name})")
        if dataset.tokens < 1:
            raise Refused(f"{path}: the dataset is empty")
        for shard in dataset.shards:
            _check_file(folder / shard.tokens_file, shard.tokens_bytes, shard.tokens, dataset.dtype)
            _check_file(folder / shard.documents_file, shard.documents_bytes, shard.documents, "uint64")
        return dataset

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of what is read: the shards' checksums and the tokenizer's fingerprint."""
        sums = [(shard.tokens_sha256, shard.documents_sha256) for shard in self.shards]
        return hashlib.sha256(json.dumps([self.tokenizer_fingerprint, sums]).encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the dataset was built with."""
        tokenizer = load_tokenizer("bytes" if self.built_in_tokenizer else str(self.folder / "tokenizer.json"))
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise Refused(f"{self.folder / 'tokenizer.json'}: not the tokenizer that {MANIFEST} names")
        return tokenizer

    def verify(self) -> None:
        """Read everything: checksums, ids below the vocabulary, document ends; raises Refused naming the bad file."""
        self.tokenizer()
        for number, shard in enumerate(self.shards):
            for name, expected in (
                (shard.tokens_file, shard.tokens_sha256),
                (shard.documents_file, shard.documents_sha256),
            ):
                if file_sha256(self.folder / name) != expected:
                    raise Refused(f"{self.folder / name}: its content is not what {MANIFEST} says (sha256 differs)")
            tokens, ends = self._shard(number)
            if int(tokens.max()) >= self.vocabulary_size:
                raise Refused(f"{self.folder / shard.tokens_file}: ids beyond the vocabulary of {self.vocabulary_size}")
            if int(ends[-1]) != shard.tokens or not (ends[1:] > ends[:-1]).all():
                raise Refused(f"{self.folder / shard.documents_file}: document ends do not rise to {shard.tokens}")

    def rows(self, sequence_length: int) -> int:
        """Number of rows of `sequence_length` stored tokens; the last one may be padded."""
        return -(-self.tokens // sequence_length)

    def gather(self, rows: np.ndarray, sequence_length: int) -> Rows:
        """The rows with these indices (`[n]` integers; `PADDING_ROW` gives an empty one), all at once.

        One copy per shard touched; only rows that reach over the end of a shard are copied by themselves.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and not PADDING_ROW <= rows.min() <= rows.max() < self.rows(sequence_length):
            raise IndexError(f"rows {rows.min()} to {rows.max()}; there are {self.rows(sequence_length)}")
        begin = rows * sequence_length
        length = np.where(rows == PADDING_ROW, 0, np.minimum(self.tokens - begin, sequence_length))
        tokens = np.zeros((len(rows), sequence_length), np.int32)
        starts = np.zeros((len(rows), sequence_length), bool)
        first_shard = np.searchsorted(self._offsets, begin, "right") - 1
        last_shard = np.searchsorted(self._offsets, begin + length - 1, "right") - 1
        row_of, shard_of = _ranges(first_shard, np.where(length > 0, last_shard + 1, first_shard))
        for number in np.unique(shard_of):
            row = row_of[shard_of == number]
            shard_tokens, ends = self._shard(int(number))
            begin_in_shard = begin[row] - self._offsets[number]
            _copy_tokens(tokens, row, begin_in_shard, shard_tokens)
            _mark_starts(starts, row, begin_in_shard, ends)
        return Rows(tokens, starts, length.astype(np.int32))

    def documents_in_row(self, row: int, sequence_length: int) -> list[DocumentSpan]:
        """The documents of a row, in order."""
        starts = self.gather(np.array([row]), sequence_length).starts[0]
        begin = row * sequence_length
        end = min(begin + sequence_length, self.tokens)
        # The row's parts begin at its first token and wherever a document begins.
        parts = sorted({0, *map(int, np.flatnonzero(starts))})
        spans = []
        for part, following in zip(parts, [*parts[1:], end - begin], strict=True):
            document, first, tokens = self._document_at(begin + part)
            spans.append(DocumentSpan(document, first, first + following - part - 1, tokens))
        return spans

    def _document_at(self, position: int) -> tuple[int, int, int]:
        """(document index, position in it, its length) of a token of the dataset."""
        number = int(np.searchsorted(self._offsets, position, "right")) - 1
        ends = self._shard(number)[1]
        local = position - int(self._offsets[number])
        document = int(np.searchsorted(ends, np.uint64(local), "right"))
        start = int(ends[document - 1]) if document else 0
        earlier = sum(shard.documents for shard in self.shards[:number])
        return earlier + document, local - start, int(ends[document]) - start

    @cached_property
    def _offsets(self) -> np.ndarray:
        """`[shards + 1] int64`: where each shard begins in the dataset."""
        return np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)

    def _shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory maps of a shard: `[tokens]` ids and `[documents] uint64` ends."""
        if number not in self._maps:
            shard = self.shards[number]
            names = (shard.tokens_file, shard.documents_file)
            tokens, ends = (np.asarray(np.load(self.folder / name, mmap_mode="r")) for name in names)
            self._maps[number] = (tokens, ends)
        return self._maps[number]


def _copy_tokens(out: np.ndarray, row: np.ndarray, begin: np.ndarray, shard: np.ndarray) -> None:
    """Copy what `shard` (`[tokens]`) holds of rows that begin at `begin` (`[n]`, may be negative) to rows of `out`."""
    length = out.shape[1]
    inside = (begin >= 0) & (begin + length <= len(shard))
    if inside.any():
        # Rows begin at multiples of the length in the dataset, so at one remainder in the shard: all copied at once.
        remainder = int(begin[inside][0]) % length
        count = (len(shard) - remainder) // length
        view = shard[remainder : remainder + count * length].reshape(count, length)
        out[row[inside]] = view[begin[inside] // length]
    for r, first in zip(row[~inside], begin[~inside], strict=True):
        low, high = max(first, 0), min(first + length, len(shard))
        out[r, low - first : high - first] = shard[low:high]


def _mark_starts(out: np.ndarray, row: np.ndarray, begin: np.ndarray, ends: np.ndarray) -> None:
    """Mark in rows of `out` where documents begin: at the start of the shard, and at each of `ends` but the last."""
    length = out.shape[1]
    first = (begin <= 0) & (begin + length > 0)
    out[row[first], -begin[first]] = True
    low = np.searchsorted(ends, np.maximum(begin, 1).astype(np.uint64))
    high = np.searchsorted(ends[:-1], (begin + length).astype(np.uint64))
    owner, document = _ranges(low, np.maximum(low, high))
    out[row[owner], ends[document].astype(np.int64) - begin[owner]] = True


def _ranges(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (i, j) with first[i] <= j < end[i], as two arrays."""
    counts = end - first
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)


def _check_file(path: Path, size: int, count: int, dtype: str) -> None:
    """Raise Refused unless `path` is a flat array of `count` items of `dtype` in a file of `size` bytes."""
    if not path.is_file():
        raise Refused(f"{path}: missing, though {path.parent / MANIFEST} lists it")
    if path.stat().st_size != size:
        raise Refused(f"{path}: {path.stat().st_size} bytes, but {MANIFEST} says {size}")
    try:
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
            shape, _, found = np.lib.format.read_array_header_1_0(file)
    except ValueError as error:
        raise Refused(f"{path}: not an .npy file ({error})") from error
    if shape != (count,) or found != np.dtype(dtype):
        raise Refused(f"{path}: holds {shape} {found}, but {MANIFEST} says ({count},) {dtype}")


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
