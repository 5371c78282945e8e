"""Writing a token dataset, so that nobody ever sees half of one."""

from __future__ import annotations

import glob
import json
import os
import platform
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxscale.config.errors import Refused
from jaxscale.data.store import FORMAT, MANIFEST, VERSION, Shard, TokenDataset, file_sha256
from jaxscale.data.tokenizer import Tokenizer


class DatasetWriter:
    """Writes a token dataset, document by document; used as a context manager.

    Everything goes to a hidden sibling of `folder`, which takes its name when the block ends well and vanishes when it
    does not. Where another builder was faster, its dataset stays if it is the same one, else Refused is raised.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, how_built: dict[str, Any], shard_tokens: int = 2**28
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.how_built = how_built
        self.shard_tokens = shard_tokens
        self.dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size <= 2**16 else np.uint32)
        self.documents, self.tokens, self.text_bytes = 0, 0, 0
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._ends: list[int] = []

    def __enter__(self) -> DatasetWriter:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._building = Path(tempfile.mkdtemp(prefix=_building_prefix(self.folder), dir=self.folder.parent))
        self._building.chmod(0o777 & ~_umask())  # mkdtemp makes a private folder
        return self

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document: its ids with markers (`[tokens]` unsigned), and the bytes of text behind them.

        Raises Refused for an empty document and for an id that is not below the tokenizer's vocabulary.
        """
        if len(ids) == 0:
            raise Refused(f"{self.folder}: document {self.documents} has no tokens")
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.tokenizer.vocabulary_size:
            raise Refused(
                f"{self.folder}: document {self.documents} has ids from {ids.min()} to {ids.max()}; "
                f"the vocabulary has ids from 0 to {self.tokenizer.vocabulary_size - 1}"
            )
        if self._file is not None and self._ends[-1] + len(ids) > self.shard_tokens:
            self._finish_shard()
        if self._file is None:
            self._file = open(self._building / f"tokens-{len(self._shards):05d}.npy", "w+b")  # noqa: SIM115
            _write_header(self._file, self.dtype, 0)
        self._file.write(ids.astype(self.dtype).tobytes())
        self._ends.append((self._ends[-1] if self._ends else 0) + len(ids))
        self.documents += 1
        self.tokens += len(ids)
        self.text_bytes += text_bytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._file is not None:
                self._file.close()
            shutil.rmtree(self._building, ignore_errors=True)

    def _finish_shard(self) -> None:
        assert self._file is not None
        number, count = len(self._shards), self._ends[-1]
        _write_header(self._file, self.dtype, count)
        self._file.close()
        tokens = self._building / f"tokens-{number:05d}.npy"
        documents = self._building / f"documents-{number:05d}.npy"
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
        self._file, self._ends = None, []

    def _finish(self) -> None:
        if self.documents == 0:
            raise Refused(f"{self.folder}: no documents, so no dataset was written")
        self._finish_shard()
        self.tokenizer.save(self._building / "tokenizer.json")
        (self._building / MANIFEST).write_text(self._manifest())
        built = TokenDataset.open(self._building)
        try:
            self._building.rename(self.folder)
        except OSError as error:
            if not self.folder.exists():
                raise
            if TokenDataset.open(self.folder).fingerprint != built.fingerprint:
                raise Refused(f"{self.folder}: another dataset is there; remove it or name another folder") from error

    def _manifest(self) -> str:
        tokenizer = self.tokenizer
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "dtype": self.dtype.name,
            "tokenizer": {
                "built_in": tokenizer.definition is None,
                "fingerprint": tokenizer.fingerprint,
                "vocabulary_size": tokenizer.vocabulary_size,
                "end_id": tokenizer.end_id,
                "begin_id": tokenizer.begin_id,
                "mask_id": tokenizer.mask_id,
            },
            "built": self.how_built,
            "shards": [asdict(shard) for shard in self._shards],
        }
        return json.dumps(manifest, indent=1) + "\n"


def remove_unfinished(folder: Path) -> None:
    """Remove what dead builders of this host left beside `folder`; only for who knows that no live one is there."""
    for left in folder.parent.glob(glob.escape(_building_prefix(folder)) + "*"):
        shutil.rmtree(left, ignore_errors=True)


def _building_prefix(folder: Path) -> str:
    """How the names of the unfinished siblings of a dataset's folder start."""
    return f".{folder.name}.building-{platform.node()}-"


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """Write the .npy header at the start; NumPy pads it so that it keeps its size while `count` grows."""
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
