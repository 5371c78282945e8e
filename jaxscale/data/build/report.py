"""What a build has done, as facts and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jaxscale.data.build.finish import LISTED
from jaxscale.data.build.tally import MALFORMED
from jaxscale.data.store import TokenDataset

SHOWN = 5
"""Places that are shown for each reason."""


@dataclass(frozen=True)
class SplitReport:
    """What one dataset holds."""

    folder: Path
    documents: int
    tokens: int
    text_bytes: int
    """Bytes of text that were encoded."""
    stored_bytes: int
    """Bytes of its shards."""


@dataclass(frozen=True)
class BuildReport:
    """What `build` did."""

    splits: tuple[SplitReport, ...]
    """The training split, then the validation split if a share is held out."""
    built: bool
    """False: the datasets were there already, and nothing was done."""
    corpus_bytes: int
    """Bytes of the files of the corpus."""
    skipped: dict[str, int]
    """Reason -> number of lines, rows or files that gave no document."""
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Reason -> the first of them, each `FILE:LINE` with what is wrong."""
    seconds: float = 0.0


def split_report(dataset: TokenDataset) -> SplitReport:
    """What there is to say of a dataset that was built here."""
    stored = sum(shard.tokens_bytes + shard.documents_bytes for shard in dataset.shards)
    assert dataset.text_bytes is not None  # known of all that is built here
    return SplitReport(dataset.folder, dataset.documents, dataset.tokens, dataset.text_bytes, stored)


def text(report: BuildReport) -> str:
    """A line for each split, for the whole, and for each reason why something was left out, with its first places."""
    splits = report.splits
    lines = [
        f"{split.folder}: {split.documents:,} documents, {split.tokens:,} tokens, "
        f"{split.text_bytes / split.tokens:.2f} bytes of text a token"
        for split in splits
    ]
    text_bytes, stored = sum(split.text_bytes for split in splits), sum(split.stored_bytes for split in splits)
    lines.append(
        f"{report.corpus_bytes:,} bytes in, {text_bytes:,} of text, {stored:,} bytes out: "
        f"{report.corpus_bytes / stored:.2f} to 1"
    )
    for reason, count in report.skipped.items():
        lines.append(f"left out {count:,}: {reason}")
        places = report.places.get(reason, ())
        lines += [f"  {place}" for place in places[:SHOWN]]
        if len(places) > SHOWN and reason == MALFORMED:
            lines.append(f"  all are listed in {splits[0].folder / LISTED}")
    lines.append(f"built in {report.seconds:.1f} s" if report.built else "nothing to do: already built")
    return "\n".join(lines)
