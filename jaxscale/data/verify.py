"""Reading datasets from end to end, against what was recorded about them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxscale.config.errors import Refused
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import TokenDataset


@dataclass(frozen=True)
class Verified:
    """A dataset that was read and found whole."""

    path: str
    documents: int
    tokens: int
    bytes_read: int
    seconds: float
    first_reading: bool
    """Token files of another program, of which nothing was recorded before: now there is."""


def verify(path: Path, tokenizer: str | None = None, progress: Progress = silent) -> Verified:
    """Read all of a dataset, or of token files of another program: checksums, ids, where documents end.

    Raises Refused, naming each bad file.
    """
    begun = time.monotonic()
    recorded = TokenDataset.find(path, tokenizer)
    dataset = recorded or TokenDataset.open(path, tokenizer, progress)
    if recorded:
        recorded.verify(progress)
    size = sum(shard.tokens_bytes + shard.documents_bytes for shard in dataset.shards)
    seconds = time.monotonic() - begun
    return Verified(str(path), dataset.documents, dataset.tokens, size, seconds, recorded is None)


def verify_all(
    datasets: Sequence[tuple[Path, str | None]], progress: Progress = silent
) -> tuple[list[Verified], list[str]]:
    """`verify` each of the datasets (path and tokenizer): those that are whole, and what is wrong with the others."""
    found, wrong = [], []
    for path, tokenizer in datasets:
        try:
            found.append(verify(path, tokenizer, progress))
        except Refused as complaint:
            wrong.append(str(complaint))
    return found, wrong


def verified_text(found: Sequence[Verified]) -> str:
    """What was verified, a line for each dataset."""
    return "\n".join(
        f"{one.path}: {one.documents:,} documents, {one.tokens:,} tokens, {one.bytes_read / 1e9:,.3f} GB "
        f"at {one.bytes_read / one.seconds / 1e9:,.2f} GB/s: "
        + ("read for the first time, its checksums are recorded now" if one.first_reading else "as recorded")
        for one in found
    )
