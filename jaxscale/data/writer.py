"""Writing a token dataset, so that nobody ever sees half of one."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data.manifest import MANIFEST, Shard, manifest_text
from jaxscale.data.origin import Origin, OriginWriter
from jaxscale.data.scan import file_sha256
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import Tokenizer


class ShardWriter:
    """Writes documents into shard files, numbered from 0, in a folder that is there."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = 2**28) -> None:
        """`shard_tokens`: most tokens in one shard, unless a single document has more."""
        self.folder = folder
        self.vocabulary_size = tokenizer.vocabulary_size
        self.shard_tokens = shard_tokens
        self.dtype = tokenizer.dtype
        self.documents, self.tokens, self.text_bytes = 0, 0, 0
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._ends: list[int] = []
        self._origins: OriginWriter | None = None

    def add(self, ids: np.ndarray, text_bytes: int, origin: Origin | None = None) -> None:
        """Append one document: its ids with markers (`[tokens]` unsigned), the bytes of text behind them, and where it
        comes from; of one folder either all documents have an origin or none.

        Raises Refused for an empty document and for an id that is not below the tokenizer's vocabulary.
        """
        if len(ids) == 0:
            raise Refused(f"{self.folder}: document {self.documents} has no tokens")
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary_size:
            raise Refused(
                f"{self.folder}: document {self.documents} has ids from {ids.min()} to {ids.max()}; "
                f"the vocabulary has ids from 0 to {self.vocabulary_size - 1}"
            )
        if self._file is not None and self._ends[-1] + len(ids) > self.shard_tokens:
            self._finish_shard()
        if self._file is None:
            self._file = open(self.folder / tokens_file(len(self._shards)), "w+b")  # noqa: SIM115
            _write_header(self._file, self.dtype, 0)
        self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(ids))
        if origin is not None:
            self._origins = self._origins or OriginWriter(self.folder / origins_file(len(self._shards)))
            self._origins.add(origin)
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes

    def finish(self) -> list[Shard]:
        """Complete the last shard; returns all of them, of which there may be none."""
        if self._file is not None:
            self._finish_shard()
        return self._shards

    def close(self) -> None:
        """Give up what is open."""
        if self._file is not None:
            self._file.close()
        if self._origins is not None:
            self._origins.close()

    def _finish_shard(self) -> None:
        assert self._file is not None
        number, count = len(self._shards), self._ends[-1]
        _write_header(self._file, self.dtype, count)
        self.close()
        tokens, documents = self.folder / tokens_file(number), self.folder / documents_file(number)
        np.save(documents, np.array(self._ends, np.uint64))
        self._shards.append(
            Shard(
                tokens_file=tokens.name,
                tokens=count,
                tokens_bytes=tokens.stat().st_size,
                tokens_sha256=file_sha256(tokens),
                documents_file=documents.name,
                documents=len(self._ends),
                documents_bytes=documents.stat().st_size,
                documents_sha256=file_sha256(documents),
            )
        )
        self._file, self._ends, self._origins = None, [], None


class DatasetWriter(ShardWriter):
    """Writes a whole token dataset, document by document; used as a context manager.

    Everything goes to a hidden sibling of `folder`, which takes its name when the block ends well and vanishes when it
    does not. Where another builder was faster, its dataset stays if it is the same one, else Refused is raised.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, how_built: dict[str, Any], shard_tokens: int = 2**28
    ) -> None:
        super().__init__(folder, tokenizer, shard_tokens)
        self._target, self._tokenizer, self._how_built = folder, tokenizer, how_built

    def __enter__(self) -> DatasetWriter:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{self._target.name}.writing-{platform.node()}-"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._target.parent))
        self.folder.chmod(0o777 & ~_umask())  # mkdtemp makes a private folder
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self.documents == 0:
                    raise Refused(f"{self._target}: no documents, so no dataset was written")
                complete(self.folder, self._target, self._tokenizer, self.finish(), self.text_bytes, self._how_built)
        finally:
            self.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def complete(
    folder: Path, target: Path, tokenizer: Tokenizer, shards: list[Shard], text_bytes: int, how_built: dict[str, Any]
) -> None:
    """Make the folder of these shards a dataset, and give it the name `target`.

    A dataset that is there already stays if it is the same one; else Refused is raised.
    """
    tokenizer.save(folder / "tokenizer.json")
    (folder / MANIFEST).write_text(manifest_text(tokenizer, tokenizer.dtype.name, shards, text_bytes, how_built))
    fingerprint = TokenDataset.open(folder).fingerprint
    try:
        folder.rename(target)
    except OSError as error:
        if not target.exists():
            raise
        if TokenDataset.open(target).fingerprint != fingerprint:
            raise Refused(f"{target}: another dataset is there; remove it or name another folder") from error


def renumbered(shard: Shard, number: int) -> Shard:
    """The shard under the names of another number."""
    return replace(shard, tokens_file=tokens_file(number), documents_file=documents_file(number))


def tokens_file(number: int) -> str:
    """Name of the file of tokens of a shard."""
    return f"tokens-{number:05d}.npy"


def documents_file(number: int) -> str:
    """Name of the file of a shard's document ends."""
    return f"documents-{number:05d}.npy"


def origins_file(number: int) -> str:
    """Name of the file that tells where a shard's documents come from."""
    return f"documents-{number:05d}.parquet"


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """Write the .npy header at the start; NumPy pads it so that it keeps its size while `count` grows."""
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
