"""The work of one build: which tasks there are, and the folder in which their results wait until all are there.

    plan.json            what is built from what
    tokenizer.json       a copy of the tokenizer, unless it is the built-in `bytes`
    seen/00000.npy       of task 0, the hashes of its documents, where duplicates are removed
    repeated/00000.npy   of one range of hashes, the documents that come again
    encoded/00000/       of task 0, the shards of each split and `report.json`

Each of these is a function of the plan alone, and appears under its name only when it is complete. So workers need not
know of each other, a killed one loses only what it was at, and the same task done twice gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from jaxscale.config.data import BuildConfig
from jaxscale.data.build.corpus import Task, corpus_files, tasks
from jaxscale.data.build.readers import CorpusFile
from jaxscale.data.files import replace_file
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer

SEEN, REPEATED, ENCODED = "seen", "repeated", "encoded"
"""The stages of a build, in order; the first two only where duplicates are removed."""

BYTES_OF_RANGE = 2**34
"""Bytes of input for each range of hashes, which bounds the memory that finding duplicates takes."""

EXECUTION = {"executor", "workers", "slurm"}
"""Settings of a build that its result does not depend on."""


@dataclass(frozen=True)
class Plan:
    """What is built, and from what."""

    settings: BuildConfig
    splits: int
    """1, or 2 where a share of the documents is held out."""
    files: tuple[CorpusFile, ...]
    tokenizer_fingerprint: str
    engine: str
    """The library that encodes: tokenizers, or tiktoken where it gives the same ids."""

    @staticmethod
    def make(settings: BuildConfig, splits: int, tokenizer: Tokenizer) -> Plan:
        """The plan for a corpus as it is now; raises Refused as `corpus_files` does."""
        return Plan(settings, splits, tuple(corpus_files(settings)), tokenizer.fingerprint, tokenizer.engine)

    @cached_property
    def tasks(self) -> list[Task]:
        """The parts of the corpus that are read, encoded and written as one."""
        return tasks(self.files, self.settings)

    @property
    def corpus_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def stages(self) -> dict[str, int]:
        """Number of tasks of each stage, in order."""
        ranges = {SEEN: len(self.tasks), REPEATED: -(-self.corpus_bytes // BYTES_OF_RANGE) or 1}
        return (ranges if self.settings.remove_duplicates else {}) | {ENCODED: len(self.tasks)}

    @property
    def digest(self) -> str:
        """A name for the plan."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        """The plan as JSON."""
        settings = self.settings.model_dump(mode="json", exclude=EXECUTION)
        return json.dumps(asdict(self) | {"settings": settings})

    @staticmethod
    def read(text: str) -> Plan:
        """The plan from its JSON."""
        plan = json.loads(text)
        settings = BuildConfig.model_validate_json(json.dumps(plan.pop("settings")))
        return Plan(settings, files=tuple(CorpusFile(*file) for file in plan.pop("files")), **plan)


@dataclass(frozen=True)
class Work:
    """A plan, and the folder of its results."""

    folder: Path
    plan: Plan

    @staticmethod
    def begin(parent: Path, plan: Plan, tokenizer: Tokenizer) -> Work:
        """The work on `plan` in a folder of its own below `parent`, as far as it has been done.

        Work on other plans is thrown away; a worker that is still at it finds its folder gone, and fails.
        """
        work = Work(parent / plan.digest, plan)
        for other in parent.glob("*"):
            if other != work.folder:
                shutil.rmtree(other, ignore_errors=True)
        work.folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(work.folder / "tokenizer.json")
        replace_file(work.folder / "plan.json", plan.text().encode())
        return work

    @staticmethod
    def open(folder: Path) -> Work:
        """The work in a folder, as a worker finds it."""
        return Work(folder, Plan.read((folder / "plan.json").read_text()))

    @cached_property
    def reference(self) -> Tokenizer:
        """The tokenizer, run by the library that defines its ids."""
        copy = self.folder / "tokenizer.json"
        return load_tokenizer(str(copy) if copy.is_file() else "bytes")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, run by the library that the plan names."""
        return self.reference if self.plan.engine == self.reference.engine else self.reference.faster(proven=True)

    def result(self, stage: str, number: int) -> Path:
        """Where the result of a task is, once it is complete."""
        return self.folder / stage / (f"{number:05d}" + ("" if stage == ENCODED else ".npy"))

    def missing(self, stage: str) -> list[int]:
        """The tasks of a stage that are not done."""
        folder = self.folder / stage
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        return [number for number in range(self.plan.stages[stage]) if self.result(stage, number).name not in there]

    @contextmanager
    def written(self, stage: str, number: int) -> Iterator[Path]:
        """A path to write a result to; it gets its name when the block ends well, and vanishes when it does not."""
        result = self.result(stage, number)
        result.parent.mkdir(exist_ok=True)
        temporary = result.with_name(f".{result.stem}.{socket.gethostname()}.{os.getpid()}{result.suffix}")
        _remove(temporary)
        try:
            yield temporary
            try:
                os.replace(temporary, result)
            except OSError:
                if not result.exists():
                    raise
        finally:
            _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
