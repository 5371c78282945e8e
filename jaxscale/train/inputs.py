"""The datasets of a run: built where they are missing, opened, and held against the model."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

from rich.console import Console

from jaxscale.cluster.distributed import ALONE, Processes, exchange
from jaxscale.config.errors import Refused
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config
from jaxscale.data.build import prepare
from jaxscale.data.mixture import Mixture, open_mixture
from jaxscale.data.progress import Progress, shown_on_stderr, silent
from jaxscale.data.relay import ALONE as STAGES_ALONE
from jaxscale.data.relay import Tree
from jaxscale.data.stage import stage
from jaxscale.data.store import TokenDataset

STAGE_SECONDS = 24 * 3600
"""Longest that processes wait for the slowest host to have its copy."""


def open_datasets(config: Config, console: Console, processes: Processes = ALONE) -> tuple[Mixture, dict[str, Mixture]]:
    """What the run trains on, and each validation split by name.

    Raises:
        Refused: a dataset is missing or not whole, or has another tokenizer or tokens that the model lacks.
    """
    if config.data.build is not None:
        build(config, console)
    with shown_on_stderr() if processes.first else nullcontext(silent) as progress:
        train = open_mixture(config.data, progress, partial(locate, config, processes, progress))
    if config.sample.prompt is not None:
        train.first.tokenizer()  # a damaged one is refused now, not after the training
    if train.tokens < (longest := max(phase.sequence_length for phase in phases_of(config))):
        raise Refused(
            f"data.sequence_length = {longest}, but all the training data have {train.tokens} tokens; "
            f"nearest: data.sequence_length={train.tokens}"
        )
    validation = {
        split: {source: TokenDataset.open(path, config.data.tokenizer) for source, path in paths.items()}
        for split, paths in config.data.validation_sets.items()
    }
    if train.first.vocabulary_size > config.model.vocabulary_size:
        raise Refused(
            f"model.vocabulary_size = {config.model.vocabulary_size}, but {train.first.path} has token ids up to "
            f"{train.first.vocabulary_size - 1}; nearest: model.vocabulary_size={train.first.vocabulary_size}"
        )
    for split, datasets in validation.items():
        for source, dataset in datasets.items():
            if dataset.tokenizer_fingerprint != train.first.tokenizer_fingerprint:
                key = split if source == split else f"{split}.{source}"
                raise Refused(
                    f"data.validation.{key} = {dataset.path} was built with another tokenizer than {train.first.path}"
                )
    return train, {split: Mixture(datasets, train.packing) for split, datasets in validation.items()}


def locate(config: Config, processes: Processes, progress: Progress, name: str, path: Path) -> Path:
    """Where a source's data are read: its path or, where `data.stage_to` asks for it, a copy on a disk of this host.

    One process of each host copies; the others find the copy. A source that is never drawn stays where it is.
    """
    data, index = config.data, list(config.data.sources).index(name)
    if data.stage_to is None or not any(phase.weights[index] for phase in phases_of(config)):
        return path
    hosts = list(dict.fromkeys(member.host for member in processes.members))
    own = processes.members[processes.index].host
    leader = next(index for index, member in enumerate(processes.members) if member.host == own)
    tree = Tree(hosts, hosts.index(own)) if data.stage_tree and len(hosts) > 1 else STAGES_ALONE
    limit = None if data.stage_limit_gb is None else round(data.stage_limit_gb * 1e9)
    copy = partial(stage, path, data.stage_to, limit_bytes=limit, tokenizer=data.tokenizer, progress=progress)
    folder = copy(tree=tree) if processes.index == leader else None
    exchange(b"", STAGE_SECONDS)
    return copy() if folder is None else folder


def build(config: Config, console: Console) -> None:
    """Builds what `data.build` describes unless it is there."""
    with shown_on_stderr() if not console.quiet else nullcontext(silent) as progress:
        report = prepare.build(config.data, progress)
    if report.built:
        for split in report.splits:
            console.print(
                f"built       {split.folder}: {split.documents:,} documents, {split.tokens:,} tokens "
                f"({split.text_bytes / split.tokens:.2f} bytes a token)"
            )
