"""The token dataset on disk: a manifest, and shards that any NumPy user can open.

    dataset.json          what is in it, how it was built, size and sha256 of every shard file
    tokenizer.json        a copy of the tokenizer, unless it is the built-in `bytes`
    tokens-00000.npy      [tokens] uint16 or uint32: the documents of the shard, end to end, with their markers
    documents-00000.npy   [documents] uint64: where each document of the shard ends, counted from the shard's start

A document never spans shards. A dataset appears under its name only when it is complete, and is never changed after.
Token files of other programs are the shards of such a dataset in the cache folder (`foreign.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data import foreign
from jaxscale.data.formats import named
from jaxscale.data.manifest import MANIFEST, Manifest, Shard, read_manifest
from jaxscale.data.progress import Progress, silent
from jaxscale.data.scan import file_sha256, in_parallel, pieces, token_blocks
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer

PADDING_ROW = -1
"""Row index that `gather` fills with padding: length 0, all ids 0."""


class Rows(NamedTuple):
    """Rows cut from the documents laid end to end."""

    tokens: np.ndarray
    """`[rows, sequence] int32`: stored ids, 0 where padded."""
    starts: np.ndarray
    """`[rows, sequence] bool`: True where a document begins."""
    lengths: np.ndarray
    """`[rows] int32`: number of real tokens; padding is at the end only."""

    @staticmethod
    def empty(rows: int, sequence_length: int) -> Rows:
        """Rows that views are to fill: nothing is known of the tokens yet, no document starts, all lengths are 0."""
        shape = (rows, sequence_length)
        return Rows(np.empty(shape, np.int32), np.zeros(shape, bool), np.zeros(rows, np.int32))


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
class TokenDataset(Manifest):
    """A token dataset opened for reading; the files are memory-mapped when first touched."""

    path: Path
    """What was opened: the dataset's folder, or token files of another program."""
    folder: Path
    """The folder of the manifest: `path`, or a folder in the cache folder."""
    _maps: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What another process is sent: not the memory maps, which it opens itself."""
        return {**self.__dict__, "_maps": {}}

    @staticmethod
    def find(path: Path, tokenizer: str | None = None) -> TokenDataset | None:
        """What `open` opens if that takes no time; None where nothing is there yet, or what has not been read yet.

        Raises Refused as `open` does.
        """
        there = (path / MANIFEST).is_file() or (named(path) and foreign.known(path, tokenizer))
        return TokenDataset.open(path, tokenizer) if there else None

    @staticmethod
    def open(path: Path, tokenizer: str | None = None, progress: Progress = silent) -> TokenDataset:
        """Open the dataset in the folder `path`, or token files of another program (see `foreign.adopt`).

        `tokenizer`: `bytes` or the path of a `tokenizer.json`; needed by files of other programs that have none beside
        them, and held against a dataset's own one. `progress` is told while such files are read for the first time.

        Raises Refused, naming the file, for anything missing, cut short or of another kind. Sizes and headers are
        checked here, contents only by `verify`.
        """
        folder = path if (path / MANIFEST).is_file() else foreign.adopt(path, tokenizer, progress)
        dataset = TokenDataset(**vars(read_manifest(folder)), path=path, folder=folder)
        if folder == path and tokenizer and load_tokenizer(tokenizer).fingerprint != dataset.tokenizer_fingerprint:
            raise Refused(f"{path}: was built with another tokenizer than {tokenizer}; leave it out, it has its own")
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

    def verify(self, progress: Progress = silent) -> None:
        """Read everything: checksums, ids below the vocabulary, document ends; raises Refused naming each bad file."""
        self.tokenizer()
        total = sum(shard.tokens_bytes + shard.documents_bytes for shard in self.shards)
        complaints = in_parallel(self._verify_shard, self.shards, f"verifying {self.path}", total, progress)
        if found := [complaint for complaint in complaints if complaint]:
            raise Refused("\n".join(found))

    def _verify_shard(self, shard: Shard, advance: Callable[[int], None]) -> str | None:
        """What is wrong with a shard."""
        path, documents = self.folder / shard.tokens_file, self.folder / shard.documents_file
        sums, largest, last = hashlib.sha256(), 0, 0
        for block in token_blocks(path, _header_bytes(shard, self.dtype), self.dtype, sums):
            advance(block.nbytes)
            largest = max(largest, int(block.max()))
        if sums.hexdigest() != shard.tokens_sha256:
            return f"{path}: its content is not what {self.folder / MANIFEST} says (sha256 differs)"
        if file_sha256(documents) != shard.documents_sha256:
            return f"{documents}: its content is not what {self.folder / MANIFEST} says (sha256 differs)"
        if largest >= self.vocabulary_size:
            return f"{path}: ids beyond the vocabulary of {self.vocabulary_size}, up to {largest}"
        for ends in pieces(np.load(documents, mmap_mode="r")):
            if last >= int(ends[0]) or not (ends[1:] > ends[:-1]).all():
                return f"{documents}: document ends do not rise"
            last = int(ends[-1])
        advance(shard.documents_bytes)
        return None if last == shard.tokens else f"{documents}: ends at token {last}, but the shard at {shard.tokens}"

    def rows(self, sequence_length: int) -> int:
        """Number of rows of `sequence_length` stored tokens; the last one may be padded."""
        return -(-self.tokens // sequence_length)

    def gather(self, rows: np.ndarray, sequence_length: int) -> Rows:
        """The rows with these indices (`[n]` integers; `PADDING_ROW` gives an empty one), all at once."""
        out = Rows.empty(len(rows), sequence_length)
        self.gather_into(out, np.arange(len(rows)), rows)
        return out

    def gather_into(self, out: Rows, places: np.ndarray, rows: np.ndarray) -> None:
        """Write the rows with these indices (`[n]` integers) to places (`[n] int64`) of `out`.

        Tokens are copied by slices, one for each row and shard that it lies in, so that it does not matter how many
        shards there are; where documents start is looked up once for each shard.
        """
        rows, length, offsets = np.asarray(rows, np.int64), out.tokens.shape[1], self.offsets
        if rows.size and not PADDING_ROW <= rows.min() <= rows.max() < self.rows(length):
            raise IndexError(f"rows {rows.min()} to {rows.max()}; there are {self.rows(length)}")
        begin = rows * length
        size = np.where(rows == PADDING_ROW, 0, np.minimum(self.tokens - begin, length))
        out.lengths[places] = size
        out.tokens[places[size < length]] = 0
        first = np.searchsorted(offsets, begin, "right") - 1
        last = np.searchsorted(offsets, begin + size - 1, "right") - 1
        row, shard = ranges(first, np.where(size > 0, last + 1, first))
        if not len(row):
            return
        by_position = np.argsort(begin[row], kind="stable")
        row, shard = row[by_position], shard[by_position]
        # The part of each row that lies in a shard: from `low` to `high` there, `shift` further on in `out`.
        low = np.maximum(begin[row] - offsets[shard], 0)
        high = np.minimum(begin[row] + size[row], offsets[shard + 1]) - offsets[shard]
        shift = places[row] * length + offsets[shard] - begin[row]
        bounds, starts = np.stack([low, high], axis=1).astype(np.uint64), []
        flat, numbers = out.tokens.reshape(-1), shard.tolist()
        parts = list(zip(*(x.tolist() for x in (low, high, low + shift, high + shift)), strict=True))
        for a, b in pairwise([0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(numbers)]):
            tokens, ends = self.shard(numbers[a])
            for from_, to, place, place_end in parts[a:b]:
                flat[place:place_end] = tokens[from_:to]
            starts += [ends[e:f] for e, f in ends.searchsorted(bounds[a:b]).tolist()]
        marks = out.starts.reshape(-1)
        marks[(low + shift)[low == 0]] = True
        marks[np.concatenate(starts).astype(np.int64) + np.repeat(shift, [len(x) for x in starts])] = True

    def documents_in_row(self, row: int, sequence_length: int) -> list[DocumentSpan]:
        """The documents of a row, in order."""
        starts = self.gather(np.array([row]), sequence_length).starts[0]
        begin = row * sequence_length
        end = min(begin + sequence_length, self.tokens)
        # The row's parts begin at its first token and wherever a document begins.
        parts = sorted({0, *map(int, np.flatnonzero(starts))})
        spans = []
        for part, following in zip(parts, [*parts[1:], end - begin], strict=True):
            document, first, tokens = self.document_at(begin + part)
            spans.append(DocumentSpan(document, first, first + following - part - 1, tokens))
        return spans

    def document_at(self, position: int) -> tuple[int, int, int]:
        """(document index, position in it, its length) of a token of the dataset."""
        number = int(np.searchsorted(self.offsets, position, "right")) - 1
        ends = self.shard(number)[1]
        local = position - int(self.offsets[number])
        document = int(np.searchsorted(ends, np.uint64(local), "right"))
        start = int(ends[document - 1]) if document else 0
        earlier = sum(shard.documents for shard in self.shards[:number])
        return earlier + document, local - start, int(ends[document]) - start

    @cached_property
    def offsets(self) -> np.ndarray:
        """`[shards + 1] int64`: where each shard begins in the dataset."""
        return np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)

    def shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory maps of a shard: `[tokens]` ids and `[documents] uint64` ends."""
        if number not in self._maps:
            shard = self.shards[number]
            header = _header_bytes(shard, self.dtype)
            tokens = np.memmap(self.folder / shard.tokens_file, self.dtype, "r", header, shard.tokens)
            ends = np.load(self.folder / shard.documents_file, mmap_mode="r")
            self._maps[number] = (np.asarray(tokens), np.asarray(ends))
        return self._maps[number]


def _header_bytes(shard: Shard, dtype: str) -> int:
    """Size of what stands before the ids in the file of tokens."""
    return shard.tokens_bytes - shard.tokens * np.dtype(dtype).itemsize


def ranges(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (i, j) with first[i] <= j < end[i], as two arrays."""
    counts = end - first
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
