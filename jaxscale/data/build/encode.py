"""One task of a build: documents of a part of the corpus -> shards, as a function of the plan alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jaxscale.data.build.arrange import Arrangement, chance, encoded
from jaxscale.data.build.corpus import Document, documents
from jaxscale.data.build.duplicates import repeated_documents, write_repeated, write_seen
from jaxscale.data.build.tally import Place, Tally
from jaxscale.data.build.work import ENCODED, REPEATED, SEEN, Work
from jaxscale.data.files import replace_file
from jaxscale.data.manifest import Shard
from jaxscale.data.origin import Origin
from jaxscale.data.tokenizer import Tokenizer
from jaxscale.data.writer import ShardWriter

BATCH = 2**22
"""Characters of text that are encoded at one time."""
CHECKED = 2**16
"""Characters at the start of each batch that are encoded by both libraries, and compared."""

Advance = Callable[[int], None]
"""Told how many more bytes of the corpus have been read."""


@dataclass(frozen=True)
class Split:
    """What a task has written of one split."""

    shards: tuple[Shard, ...]
    text_bytes: int


@dataclass(frozen=True)
class TaskReport:
    """What a task has done."""

    splits: tuple[Split, ...]
    tally: Tally
    same_ids: bool
    """False: the faster library gave other ids somewhere, so nothing of this plan can be used."""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        replace_file(path, json.dumps(asdict(self)).encode())

    @staticmethod
    def read(path: Path) -> TaskReport:
        """Read what `write` has written."""
        report = json.loads(path.read_bytes())
        splits = (Split(tuple(Shard(**s) for s in split["shards"]), split["text_bytes"]) for split in report["splits"])
        tally = report["tally"]
        places = {reason: [Place(*place) for place in found] for reason, found in tally["places"].items()}
        return TaskReport(tuple(splits), Tally(tally["bytes_read"], tally["skipped"], places), report["same_ids"])


def perform(work: Work, stage: str, number: int, advance: Advance) -> None:
    """Do one task of a stage. Raises Refused for what cannot be right in the corpus, OSError for the disk."""
    tally = Tally()
    if stage == SEEN:
        write_seen(work, number, tally)
        advance(tally.bytes_read)
    elif stage == REPEATED:
        write_repeated(work, number)
    else:
        with work.written(ENCODED, number) as folder:
            folder.mkdir()
            _encode(work, number, tally, advance, folder).write(folder / "report.json")


def split_folder(result: Path, split: int) -> Path:
    """Where a task's result has the shards of a split: 0 is for training, 1 held out."""
    return result / ("train", "validation")[split]


def held_out(document: Document, share: float) -> bool:
    """Whether a document belongs to the validation split: by a hash of its id, so that no document moves another."""
    return chance("validation", document.id) < share


def _encode(work: Work, number: int, tally: Tally, advance: Advance, folder: Path) -> TaskReport:
    settings, tokenizer = work.plan.settings, work.tokenizer
    arrangement = Arrangement.make(settings, tokenizer)
    # What is compared with the library that defines the ids, where another one encodes.
    reference = None if tokenizer.engine == work.reference.engine else work.reference
    writers = []
    for split in range(work.plan.splits):
        split_folder(folder, split).mkdir()
        writers.append(ShardWriter(split_folder(folder, split), tokenizer, settings.shard_tokens))
    read = 0
    try:
        for batch in _batches(_without_repeated(work, number, tally)):
            if reference is not None and not _same_ids(_sample(batch), tokenizer, reference):
                return TaskReport((), tally, same_ids=False)
            held = [held_out(document, settings.validation_share) for document in batch]
            arranged = [arrangement.of(document, out) for document, out in zip(batch, held, strict=True)]
            for document, out, ids in zip(batch, held, encoded(arranged, tokenizer), strict=True):
                if ids is None:
                    tally.leave_out("empty document", document.place)
                else:
                    origin = Origin(document.id, document.source, document.position)
                    writers[out].add(ids, document.text_bytes, origin)
            advance(tally.bytes_read - read)
            read = tally.bytes_read
        splits = tuple(Split(tuple(writer.finish()), writer.text_bytes) for writer in writers)
    finally:
        for writer in writers:
            writer.close()
    advance(tally.bytes_read - read)
    return TaskReport(splits, tally, same_ids=True)


def _without_repeated(work: Work, number: int, tally: Tally) -> Iterator[Document]:
    """The documents of a task, but for those that came earlier in the corpus."""
    repeated = repeated_documents(work, number)
    for i, document in enumerate(documents(work.plan.tasks[number], work.plan.settings, tally)):
        if i in repeated:
            tally.leave_out("duplicate", document.place)
        else:
            yield document


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Consecutive documents of about `BATCH` characters together."""
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _sample(batch: Sequence[Document]) -> list[str]:
    """The beginning of a batch: `CHECKED` characters of text."""
    texts: list[str] = []
    room = CHECKED
    for document in batch:
        texts.append(document.text[:room])
        room -= len(texts[-1])
        if room == 0:
            break
    return texts


def _same_ids(texts: Sequence[str], one: Tokenizer, other: Tokenizer) -> bool:
    pairs = zip(one.encode_batch(texts), other.encode_batch(texts), strict=True)
    return all(np.array_equal(ids, others) for ids, others in pairs)
