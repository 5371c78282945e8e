"""From a corpus to token datasets: train the tokenizer if asked, encode every document, write the splits."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxscale.config.errors import Fault, Refused
from jaxscale.config.schema import BuildConfig, DataConfig
from jaxscale.data.corpus import Document, Tally, corpus_files, documents
from jaxscale.data.files import locked
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from jaxscale.data.writer import DatasetWriter, remove_unfinished

Progress = Callable[[str, int, int], None]
"""Called with what is going on, bytes of the corpus that are done, and bytes that there are."""

BATCH = 2**22
"""Characters of text that are encoded at one time."""

TRAINING_BYTES = 2**26
"""About the most text that a tokenizer is trained on: of a larger corpus a random share of the documents."""


@dataclass(frozen=True)
class SplitReport:
    """What one dataset holds."""

    folder: Path
    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True)
class BuildReport:
    """What `build` did."""

    splits: tuple[SplitReport, ...]
    """The training split, then the validation split if a share is held out."""
    built: bool
    """False: the datasets were there already, and nothing was done."""
    skipped: dict[str, int]
    """Reason -> number of lines or files that gave no document."""
    malformed: tuple[str, ...] = ()
    """The first malformed ones that were skipped, each with file, line and what is wrong."""
    seconds: float = 0.0


def build(data: DataConfig, progress: Progress | None = None) -> BuildReport:
    """Build `data.train`, and the split of `data.validation` if a share is held out, as `data.build` says.

    Datasets that are there already and were built with the same settings are left as they are. Of several processes
    that build one dataset at once, one does and the others wait for it. The result depends on corpus and settings
    alone. Raises Refused for anything in the corpus that cannot be right, Fault where the disk fails. (What cannot be
    right in the settings was refused by `config.check`.)
    """
    settings = data.build
    if settings is None:
        raise Refused("data.build: not set, so there is nothing to build; it says which text and tokenizer to use")
    folders = _folders(data, settings)
    found = _already_built(folders, settings)
    if found is not None:
        return found
    try:
        with locked(data.train.parent / f".{data.train.name}.lock") as alone:
            found = _already_built(folders, settings)
            if found is not None:
                return found
            if alone:
                for folder in folders:
                    remove_unfinished(folder)
            return _build(folders, settings, progress or _silent)
    except PermissionError as error:
        raise Refused(f"{error.filename}: permission denied while building {data.train}") from error
    except OSError as error:
        raise Fault(f"building {data.train} failed: {error}") from error


def prepare_tokenizer(settings: BuildConfig, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of `data.build`; trained on the corpus first where it is not there yet and a size is asked for."""
    if settings.train_vocabulary is None:
        return load_tokenizer(settings.tokenizer)
    path = Path(settings.tokenizer)
    if not path.is_file():
        with locked(path.with_name(f".{path.name}.lock")):
            if not path.is_file():
                return train_bpe(_training_texts(settings, progress or _silent), settings.train_vocabulary, path)
    tokenizer = load_tokenizer(settings.tokenizer)
    if tokenizer.vocabulary_size != settings.train_vocabulary:
        raise Refused(
            f"data.build.train_vocabulary = {settings.train_vocabulary}, but {path} is there already with "
            f"{tokenizer.vocabulary_size} ids; remove it, name another file, or ask for {tokenizer.vocabulary_size}"
        )
    return tokenizer


def held_out(document: Document, share: float) -> bool:
    """Whether a document belongs to the validation split: by a hash of its id, so that no document moves another."""
    return _hash("validation", document.id) < share


def _folders(data: DataConfig, settings: BuildConfig) -> tuple[Path, ...]:
    """The datasets to build: training, then validation if a share is held out."""
    return (data.train, *(data.validation.values() if settings.validation_share > 0 else ()))


def _recorded(settings: BuildConfig, folder: Path) -> dict[str, Any]:
    """The settings as a dataset records them: paths as seen from the folder it is in, so that both can be moved."""
    recorded = settings.model_dump(mode="json")
    recorded["files"] = [os.path.relpath(path, folder) for path in settings.files]
    if settings.tokenizer != "bytes":
        recorded["tokenizer"] = os.path.relpath(settings.tokenizer, folder)
    return recorded


def _already_built(folders: tuple[Path, ...], settings: BuildConfig) -> BuildReport | None:
    """The report if all datasets are there; raises Refused if a folder holds anything else."""
    splits, skipped, wanted = [], {}, _recorded(settings, folders[0].parent)
    there = [folder for folder in folders if folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))]
    # Where there is a tokenizer file, what it holds decides, not where it lies.
    has_file = bool(there) and settings.tokenizer != "bytes" and Path(settings.tokenizer).is_file()
    tokenizer = load_tokenizer(settings.tokenizer) if has_file else None
    for folder in there:
        dataset = TokenDataset.open(folder)
        was = dataset.built.get("settings", {})
        if tokenizer is not None:
            if tokenizer.fingerprint != dataset.tokenizer_fingerprint:
                raise Refused(
                    f"{folder} was built with another tokenizer than {settings.tokenizer} is now; "
                    "remove the folder to build it again, or name another one"
                )
            was = {**was, "tokenizer": wanted["tokenizer"]}
        for key, value in wanted.items():
            if was.get(key) != value:
                raise Refused(
                    f"{folder} was built with data.build.{key} = {was.get(key)!r}, not {value!r}; "
                    f"remove the folder to build it again, or name another one"
                )
        splits.append(_report(dataset))
        skipped = dataset.built["skipped"]
    return BuildReport(tuple(splits), built=False, skipped=skipped) if len(splits) == len(folders) else None


def _build(folders: tuple[Path, ...], settings: BuildConfig, progress: Progress) -> BuildReport:
    begun = time.monotonic()
    tokenizer = prepare_tokenizer(settings, progress)
    if settings.begin_marker and tokenizer.begin_id is None:
        raise Refused(f"data.build.begin_marker = true: the tokenizer {settings.tokenizer!r} has no begin marker")
    tally, total = Tally(), _corpus_bytes(settings)
    built: dict[str, Any] = {
        "settings": _recorded(settings, folders[0].parent),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }
    with ExitStack() as stack:
        # The stack ends the validation split first: where the training split is, the other one is too.
        writers = [
            stack.enter_context(DatasetWriter(folder, tokenizer, built, settings.shard_tokens)) for folder in folders
        ]
        for batch in _batches(documents(settings, tally)):
            for document, ids in zip(batch, tokenizer.encode_batch([document.text for document in batch]), strict=True):
                if len(ids) == 0:  # the tokenizer's normaliser left nothing
                    tally.skipped["empty document"] += 1
                    continue
                writer = writers[held_out(document, settings.validation_share)]
                writer.add(_with_markers(ids, tokenizer, settings.begin_marker), document.text_bytes)
            progress("encoding", tally.bytes_read, total)
        built["skipped"] = dict(sorted(tally.skipped.items()))
        for writer in writers:
            if writer.documents == 0:
                share, there = settings.validation_share, sum(writer.documents for writer in writers)
                if there == 0:
                    raise Refused(f"data.build: the corpus holds no text (skipped: {_listed(built['skipped'])})")
                raise Refused(
                    f"{writer.folder}: none of the corpus's {there} documents falls to it "
                    f"(data.build.validation_share = {share}; skipped: {_listed(built['skipped'])})"
                )
    splits = tuple(_report(TokenDataset.open(folder)) for folder in folders)
    return BuildReport(splits, True, built["skipped"], tuple(tally.malformed), time.monotonic() - begun)


def _listed(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "nothing"


def _with_markers(ids: np.ndarray, tokenizer: Tokenizer, begin: bool) -> np.ndarray:
    """The stored form of a document: `[begin?] ids end`."""
    first = [tokenizer.begin_id] if begin else []
    return np.concatenate([np.array(first, np.uint32), ids, np.array([tokenizer.end_id], np.uint32)])


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


def _training_texts(settings: BuildConfig, progress: Progress) -> Iterator[str]:
    """What a tokenizer is trained on: of the training split, so much that it takes no more than about a minute."""
    tally, total = Tally(), _corpus_bytes(settings)
    share = TRAINING_BYTES / max(total, 1)
    for document in documents(settings, tally):
        if not held_out(document, settings.validation_share) and _hash("tokenizer", document.id) < share:
            yield document.text
        progress("training the tokenizer", tally.bytes_read, total)


def _corpus_bytes(settings: BuildConfig) -> int:
    return sum(path.stat().st_size for _, path in corpus_files(settings))


def _hash(purpose: str, text: str) -> float:
    """A number in [0, 1) that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {text}".encode()).digest()[:6], "big") / 2.0**48


def _report(dataset: TokenDataset) -> SplitReport:
    return SplitReport(dataset.folder, dataset.documents, dataset.tokens, dataset.text_bytes)


def _silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
