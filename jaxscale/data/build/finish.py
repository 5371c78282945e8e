"""The end of a build: the shards that the tasks have written become datasets."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxscale.config.data import BuildConfig
from jaxscale.config.errors import Refused
from jaxscale.data.build.encode import TaskReport, split_folder
from jaxscale.data.build.tally import MALFORMED, Tally, resolve
from jaxscale.data.build.work import ENCODED, EXECUTION, Work
from jaxscale.data.manifest import MANIFEST, Shard
from jaxscale.data.writer import complete, documents_file, origins_file, renumbered, tokens_file

LISTED = "malformed.txt"
"""File of the first dataset that lists everything that could not be read, if anything was skipped."""


@dataclass(frozen=True)
class _Move:
    """A shard that a task has written, and its number in the dataset."""

    source: Path
    shard: Shard
    number: int

    @property
    def waits(self) -> bool:
        """Whether it is still where the task has written it."""
        return (self.source / self.shard.tokens_file).exists()

    def to(self, folder: Path) -> Shard:
        """Move its files into `folder`, unless that has been done, and give it its new names."""
        was = int(self.shard.tokens_file[len("tokens-") : -len(".npy")])
        for name in (tokens_file, documents_file, origins_file):
            source, target = self.source / name(was), folder / name(self.number)
            if source.exists():  # else an earlier run has moved it, and was killed
                shutil.move(source, target)
        return renumbered(self.shard, self.number)


def finish(work: Work, folders: Sequence[Path], reports: Sequence[TaskReport]) -> Tally:
    """Make datasets, one for each split, of what all tasks have written; returns what they left out.

    The training split comes last: where it is, all are. Raises Refused where no document falls to a split.
    """
    tally = Tally.total(report.tally for report in reports)
    skipped = dict(sorted(tally.skipped.items()))
    built: dict[str, Any] = {
        "settings": recorded(work.plan.settings, folders[0].parent),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "encoded_by": work.plan.engine,
        "corpus_bytes": work.plan.corpus_bytes,
        "skipped": skipped,
    }
    documents = [sum(s.documents for report in reports for s in report.splits[i].shards) for i in range(len(folders))]
    for folder, count in zip(folders, documents, strict=True):
        if sum(documents) == 0:
            raise Refused(f"data.build: the corpus holds no text (skipped: {_listed(skipped)})")
        if count == 0:
            share = work.plan.settings.validation_share
            raise Refused(
                f"{folder}: none of the corpus's {sum(documents)} documents falls to it "
                f"(data.build.validation_share = {share}; skipped: {_listed(skipped)})"
            )
    for split, folder in reversed(list(enumerate(folders))):
        assembling, moves = folder.with_name(f".{folder.name}.assembling"), _moves(work, reports, split)
        if (folder / MANIFEST).is_file() and not assembling.is_dir() and not moves[0].waits:
            continue  # finished before a kill, or by another builder
        assembling.mkdir(parents=True, exist_ok=True)
        shards = [move.to(assembling) for move in moves]
        if split == 0 and MALFORMED in tally.places:
            (assembling / LISTED).write_text("".join(f"{line}\n" for line in resolve(tally.places[MALFORMED])))
        text_bytes = sum(report.splits[split].text_bytes for report in reports)
        complete(assembling, folder, work.reference, shards, text_bytes, built)
    shutil.rmtree(work.folder.parent, ignore_errors=True)
    return tally


def recorded(settings: BuildConfig, folder: Path) -> dict[str, Any]:
    """The settings as a dataset records them: what its content follows from, local paths as seen from its folder, so
    that both can be moved."""
    found: dict[str, Any] = json.loads(settings.model_dump_json(exclude=EXECUTION))
    found["files"] = [path if "://" in path else os.path.relpath(path, folder) for path in settings.files]
    if settings.tokenizer != "bytes":
        found["tokenizer"] = os.path.relpath(settings.tokenizer, folder)
    return found


def read_reports(work: Work) -> list[TaskReport]:
    """What each task has done, in order."""
    count = work.plan.stages[ENCODED]
    return [TaskReport.read(work.result(ENCODED, number) / "report.json") for number in range(count)]


def _moves(work: Work, reports: Sequence[TaskReport], split: int) -> list[_Move]:
    """The shards of a split, in the order of the corpus."""
    found: list[_Move] = []
    for number, report in enumerate(reports):
        folder = split_folder(work.result(ENCODED, number), split)
        for shard in report.splits[split].shards:
            found.append(_Move(folder, shard, len(found)))
    return found


def _listed(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "nothing"
