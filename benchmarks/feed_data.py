"""The tokens that every contestant of benchmarks/data.py feeds, and what is checked about the batches they give.

In the folder of the data, `tokens.bin` holds all rows as flat uint16, as nanoGPT has them; other programs' formats are
made from it. `sources/0`, `1` and `2` are the same tokens as token datasets of jaxscale, in the proportion of MIXTURE.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SEQUENCE = 64, 2048
"""Rows of a batch and tokens of a row."""
BATCH_TOKENS = BATCH * SEQUENCE
MIXTURE = (0.7, 0.2, 0.1)
"""Share of each source, in the data and in a batch, so that one epoch of all is one of each."""
DOCUMENT_TOKENS = 800
"""Mean length of a document; they are distributed like a lognormal of shape 1, as web pages are about."""
END, VOCABULARY = 257, 259
"""The end marker and the size of the vocabulary: those of jaxscale's `bytes` tokenizer."""


def make_data(folder: Path, tokens: int) -> None:
    """Write about so many tokens of noise; each source is a whole number of rows."""
    from jaxscale.data.tokenizer import ByteTokenizer
    from jaxscale.data.writer import DatasetWriter

    random = np.random.default_rng(0)
    with open(folder / "tokens.bin", "wb") as flat:
        for source, share in enumerate(MIXTURE):
            ids = random.integers(0, 256, int(tokens * share) // SEQUENCE * SEQUENCE, np.uint16)
            ends = document_ends(random, len(ids))
            ids[ends - 1] = END
            flat.write(ids.tobytes())
            with DatasetWriter(folder / "sources" / str(source), ByteTokenizer(), {}) as writer:
                for document in np.split(ids, ends[:-1]):
                    writer.add(document, len(document) - 1)


def document_ends(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Where documents of random lengths end that together have exactly so many tokens, `[documents] int64`."""
    mean_of_logarithm = np.log(DOCUMENT_TOKENS) - 0.5
    lengths = random.lognormal(mean_of_logarithm, 1, 2 * tokens // DOCUMENT_TOKENS + 100).astype(np.int64) + 2
    ends = np.cumsum(lengths)
    return np.append(ends[ends < tokens - 1], tokens)


def flat_tokens(folder: Path) -> np.ndarray:
    """All tokens, `[tokens] uint16`, memory-mapped."""
    return np.memmap(folder / "tokens.bin", np.uint16, "r")


def flat_rows(folder: Path) -> np.ndarray:
    """All rows, `[rows, SEQUENCE] uint16`, memory-mapped."""
    return flat_tokens(folder).reshape(-1, SEQUENCE)


def row_sums(rows: np.ndarray) -> list[int]:
    """A checksum of each row's ids (`[rows, SEQUENCE]` integers), whatever their type."""
    return [zlib.crc32(row.astype(np.uint16)) for row in rows]


def describe(batches: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """What `check` wants to know of batches."""
    return [
        {
            "shape": batch.shape,
            "kind": batch.dtype.kind,
            "smallest": int(batch.min()),
            "largest": int(batch.max()),
            "documents": int((batch == END).sum()),
            "sums": row_sums(batch),
        }
        for batch in batches
    ]


def complaint(batches: Sequence[dict[str, Any]], known: set[int] | None, once: bool) -> str | None:
    """What is wrong with the first batches of a contestant.

    Args:
        batches: what `describe` said of them.
        known: the checksums of all rows, one of which every row must have; None: rows are cut otherwise.
        once: whether no row may come twice.
    """
    for batch in batches:
        if tuple(batch["shape"]) != (BATCH, SEQUENCE) or batch["kind"] not in "iu":
            return f"a batch of shape {batch['shape']} and kind {batch['kind']!r}"
        if not 0 <= batch["smallest"] <= batch["largest"] == END:
            return f"ids from {batch['smallest']} to {batch['largest']}, not from 0 to {END}"
        if not 0.5 < batch["documents"] * DOCUMENT_TOKENS / BATCH_TOKENS < 2:
            return f"{batch['documents']} ends of documents in a batch"
    sums = [number for batch in batches for number in batch["sums"]]
    if known is not None and not known.issuperset(sums):
        return "rows that are not in the data"
    if once and len(set(sums)) < len(sums):
        return "a row twice in one epoch"
    return None
