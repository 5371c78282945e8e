"""The datasets of a run: built where they are missing, opened, and held against the model."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from jaxscale.config.errors import Refused
from jaxscale.config.schema import Config
from jaxscale.data import prepare
from jaxscale.data.store import TokenDataset


def open_datasets(config: Config, console: Console) -> tuple[TokenDataset, dict[str, TokenDataset]]:
    """The training dataset and the validation splits by name.

    Raises:
        Refused: a dataset is missing or not whole, or has another tokenizer or tokens that the model lacks.
    """
    if config.data.build is not None:
        build(config, console)
    train = TokenDataset.open(config.data.train)
    validation = {name: TokenDataset.open(folder) for name, folder in config.data.validation.items()}
    if train.vocabulary_size > config.model.vocabulary_size:
        raise Refused(
            f"model.vocabulary_size = {config.model.vocabulary_size}, but {config.data.train} has token ids up to "
            f"{train.vocabulary_size - 1}; nearest: model.vocabulary_size={train.vocabulary_size}"
        )
    for name, dataset in validation.items():
        if dataset.tokenizer_fingerprint != train.tokenizer_fingerprint:
            raise Refused(
                f"data.validation.{name} = {dataset.folder} was built with another tokenizer than {config.data.train}"
            )
    return train, validation


def build(config: Config, console: Console) -> None:
    """Builds what `data.build` describes unless it is there; a bar, in a log file a line, for each part of the work."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
            if console.is_terminal:
                bar.start()
            else:
                console.print(f"{what} ({total / 1e6:,.1f} MB of text)")
        bar.update(tasks[what], completed=done)

    try:
        report = prepare.build(config.data, progress)
    finally:
        if tasks and console.is_terminal:
            bar.stop()
    if report.built:
        for split in report.splits:
            console.print(
                f"built       {split.folder}: {split.documents:,} documents, {split.tokens:,} tokens "
                f"({split.text_bytes / split.tokens:.2f} bytes a token)"
            )
