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
from collections.abc import Callable, Iterator
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


class Parts(NamedTuple):
    """Runs of consecutive tokens, cut where a shard ends; no part is empty."""

    run: np.ndarray
    """`[parts] int64`: the run that a part belongs to, ascending."""
    shard: np.ndarray
    """`[parts] int64`: the shard that it lies in."""
    low: np.ndarray
    """`[parts] int64`: where it begins there, in tokens."""
    high: np.ndarray
    """`[parts] int64`: where it ends there."""


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

    def parts(self, begin: np.ndarray, length: np.ndarray) -> Parts:
        """Runs of `length` tokens that begin at these positions of the dataset, both `[runs] int64`."""
        end = begin + length
        first = np.searchsorted(self.offsets, begin, "right") - 1
        last = np.searchsorted(self.offsets, end - 1, "right") - 1
        run, shard = ranges(first, last + 1)
        offset = self.offsets[shard]
        low = np.maximum(begin[run], offset) - offset
        return Parts(run, shard, low, np.minimum(end[run], self.offsets[shard + 1]) - offset)

    def slices(self, parts: Parts) -> list[np.ndarray]:
        """The ids of each part, not copied."""
        shards = {number: self.shard(number)[0] for number in set(parts.shard.tolist())}
        places = zip(parts.shard.tolist(), parts.low.tolist(), parts.high.tolist(), strict=True)
        return [shards[number][low:high] for number, low, high in places]

    def starts(self, parts: Parts) -> tuple[np.ndarray, np.ndarray]:
        """Where documents begin in parts, in no order: index of the part and place in it, both `[starts] int64`."""
        # Sorted, so that each shard is searched once, and what is looked up one after the other lies close.
        by_position = np.lexsort((parts.low, parts.shard))
        shard, low = parts.shard[by_position], parts.low[by_position]
        bounds = np.stack([low, parts.high[by_position]], axis=1).astype(np.uint64)
        found = np.empty(bounds.shape, np.int64)
        for number, group in _groups(shard):
            found[group] = self.shard(number)[1].searchsorted(bounds[group])
        which, document = ranges(*found.T)
        end = np.empty(len(document), np.int64)
        for number, group in _groups(shard[which]):
            end[group] = self.shard(number)[1][document[group]]
        # A shard begins with a document, and wherever else one begins, another ends.
        opening = np.flatnonzero(low == 0)
        index = np.concatenate([by_position[opening], by_position[which]])
        return index, np.concatenate([np.zeros_like(opening), end - low[which]])

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


def _groups(values: np.ndarray) -> Iterator[tuple[int, slice]]:
    """The values of `[n]` ascending integers, each with where it stands."""
    borders = np.flatnonzero(np.diff(values, prepend=-1, append=-1)).tolist()
    return ((int(values[first]), slice(first, end)) for first, end in pairwise(borders))


def ranges(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (i, j) with first[i] <= j < end[i], as two arrays."""
    counts = end - first
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
