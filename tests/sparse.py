"""Token datasets of any size that take no room: their token files are holes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxscale.data.manifest import MANIFEST, Shard, manifest_text
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer


def sparse_array(path: Path, dtype: str, count: int) -> int:
    """Write an `.npy` file of `count` zeros as a hole; returns its size. Skips the test where there is no room."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (count,)})
        size = file.tell() + count * np.dtype(dtype).itemsize
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("the file system has no files of this size")
    return size


def sparse_dataset(folder: Path, tokens: int, shard_tokens: int = 2**28, document_tokens: int = 2**20) -> TokenDataset:
    """A dataset of `tokens` zeros, in shards and documents of these lengths, the last ones shorter."""
    folder.mkdir()
    shards = []
    for number, first in enumerate(range(0, tokens, shard_tokens)):
        count = min(shard_tokens, tokens - first)
        tokens_file, documents_file = f"tokens-{number:05d}.npy", f"documents-{number:05d}.npy"
        size = sparse_array(folder / tokens_file, "<u2", count)
        ends = np.append(np.arange(document_tokens, count, document_tokens), count).astype(np.uint64)
        np.save(folder / documents_file, ends)
        documents_size = (folder / documents_file).stat().st_size
        shards.append(Shard(tokens_file, count, size, "0" * 64, documents_file, len(ends), documents_size, "0" * 64))
    (folder / MANIFEST).write_text(manifest_text(ByteTokenizer(), "uint16", shards, tokens, {}))
    return TokenDataset.open(folder)
