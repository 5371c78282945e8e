"""From a corpus to token datasets: train the tokenizer if asked, have every task done, assemble the splits."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxscale.config.data import BuildConfig, DataConfig
from jaxscale.config.errors import Fault, Refused
from jaxscale.data.build.arrange import Arrangement, chance
from jaxscale.data.build.corpus import corpus_files, documents, tasks
from jaxscale.data.build.encode import held_out
from jaxscale.data.build.execute import run, usable_cpus
from jaxscale.data.build.finish import finish, read_reports, recorded
from jaxscale.data.build.report import BuildReport, split_report
from jaxscale.data.build.tally import Tally, resolve
from jaxscale.data.build.work import Plan, Work
from jaxscale.data.files import locked
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

TRAINING_BYTES = 2**26
"""About the most text that a tokenizer is trained on: of a larger corpus a random share of the documents."""
READ_BYTES = 2**31
"""About the most of the corpus that is read for it: of a larger one the beginning of every task."""


def build(data: DataConfig, progress: Progress | None = None) -> BuildReport:
    """Build `data.train`, and `data.held_out` if a share is held out, as `data.build` says.

    Datasets that are there already and were built with the same settings are left as they are. Of several processes
    that build one dataset at once, one does and the others wait for it. What an earlier build has finished before it
    was killed is kept. The result depends on corpus and settings alone. Raises Refused for anything in the corpus that
    cannot be right, Fault where the disk or a worker fails, StoppedEarly where a cluster has been given the work.
    (What cannot be right in the settings was refused by `config.check`.)
    """
    settings = data.build
    if settings is None:
        raise Refused("data.build: not set, so there is nothing to build; it says which text and tokenizer to use")
    assert isinstance(data.train, Path)  # else refused by `config.check`
    folders = [data.train, data.held_out] if settings.validation_share > 0 and data.held_out else [data.train]
    found = _already_built(folders, settings)
    if found is not None:
        return found
    try:
        with locked(data.train.parent / f".{data.train.name}.lock"):
            return _already_built(folders, settings) or _build(folders, settings, progress or silent)
    except PermissionError as error:
        raise Refused(f"{error.filename}: permission denied while building {data.train}") from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise Refused(f"{error.filename}: the file system of {data.train} is read-only") from error
        raise Fault(f"building {data.train} failed: {error}") from error


def prepare_tokenizer(settings: BuildConfig, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of `data.build`; trained on the corpus first where it is not there yet and a size is asked for."""
    if settings.train_vocabulary is None:
        return load_tokenizer(settings.tokenizer)
    path = Path(settings.tokenizer)
    if not path.is_file():
        with locked(path.with_name(f".{path.name}.lock")):
            if not path.is_file():
                fill = settings.fill_in_middle
                markers = (fill.prefix, fill.middle, fill.suffix) if fill else ()
                texts = _training_texts(settings, progress or silent)
                return train_bpe(texts, settings.train_vocabulary, path, markers)
    tokenizer = load_tokenizer(settings.tokenizer)
    if tokenizer.vocabulary_size != settings.train_vocabulary:
        raise Refused(
            f"data.build.train_vocabulary = {settings.train_vocabulary}, but {path} is there already with "
            f"{tokenizer.vocabulary_size} ids; remove it, name another file, or ask for {tokenizer.vocabulary_size}"
        )
    return tokenizer


def _already_built(folders: Sequence[Path], settings: BuildConfig) -> BuildReport | None:
    """The report if all datasets are there; raises Refused if a folder holds anything else."""
    splits, skipped, wanted = [], {}, recorded(settings, folders[0].parent)
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
        splits.append(split_report(dataset))
        skipped = dataset.built["skipped"]
    if len(splits) < len(folders):
        return None
    return BuildReport(tuple(splits), built=False, corpus_bytes=dataset.built["corpus_bytes"], skipped=skipped)


def _build(folders: Sequence[Path], settings: BuildConfig, progress: Progress) -> BuildReport:
    begun = time.monotonic()
    tokenizer = prepare_tokenizer(settings, progress)
    Arrangement.make(settings, tokenizer)  # refuses a tokenizer without the markers that are asked for
    plan = Plan.make(settings, len(folders), tokenizer.faster())
    slower = replace(plan, engine=tokenizer.engine)
    parent = folders[0].with_name(f".{folders[0].name}.building")
    # Where an attempt was killed whose faster library had given other ids, the work is on the slower plan.
    work = Work.begin(parent, slower if (parent / slower.digest).is_dir() else plan, tokenizer)
    _run(work, settings, progress)
    reports = read_reports(work)
    if not all(report.same_ids for report in reports):
        work = Work.begin(parent, slower, tokenizer)
        _run(work, settings, progress)
        reports = read_reports(work)
    tally = finish(work, folders, reports)
    splits = tuple(split_report(TokenDataset.open(folder)) for folder in folders)
    places = {reason: tuple(resolve(found)) for reason, found in sorted(tally.places.items())}
    skipped = dict(sorted(tally.skipped.items()))
    return BuildReport(splits, True, plan.corpus_bytes, skipped, places, time.monotonic() - begun)


def _run(work: Work, settings: BuildConfig, progress: Progress) -> None:
    """Have all tasks done where the settings say."""
    if settings.executor == "local":
        run(work, settings.workers or usable_cpus(), progress)
        return
    try:
        from jaxscale.data.build.cluster import run_on_ray, run_on_slurm
    except ImportError as error:
        raise Refused(
            f"data.build.executor = {settings.executor!r}: needs the package datatrove (pip install jaxscale[build])"
        ) from error
    if settings.executor == "slurm":
        run_on_slurm(work, settings)
    else:
        run_on_ray(work, settings, progress)


def _training_texts(settings: BuildConfig, progress: Progress) -> Iterator[str]:
    """What a tokenizer is trained on: of the training split, so much that it takes no more than about a minute."""
    tally, files = Tally(), corpus_files(settings)
    total, parts = sum(file.size for file in files), tasks(files, settings)
    share = TRAINING_BYTES / max(min(total, READ_BYTES), 1)
    read = 0
    for task in parts:
        for document in documents(task, settings, tally):
            if not held_out(document, settings.validation_share) and chance("tokenizer", document.id) < share:
                yield document.text
            progress("training the tokenizer", tally.bytes_read, total)
            if tally.bytes_read - read > READ_BYTES // len(parts):
                break
        read = tally.bytes_read
    progress("training the tokenizer", total, total)
