"""The datasets that a run trains on, as one: their rows, gathered together, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config.data import DataConfig
from jaxscale.config.errors import Refused
from jaxscale.config.phases import Phase
from jaxscale.config.schema import Config
from jaxscale.data.interleave import draws_of
from jaxscale.data.order import Examples, Order, Skip, Source
from jaxscale.data.packing import Rows, View, gather, open_view
from jaxscale.data.progress import Progress, silent
from jaxscale.data.store import TokenDataset


@dataclass(frozen=True)
class Mixture:
    """Datasets of one tokenizer, whose documents become rows in one way."""

    datasets: Mapping[str, TokenDataset]
    """By the names of the sources, in their order."""
    packing: str
    progress: Progress = field(default=silent, repr=False, compare=False)
    """Told while a packing plan is made."""
    _views: dict[tuple[int, int], View] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What a process that gathers is sent: not the memory maps, which it opens itself."""
        return {**self.__dict__, "_views": {}, "progress": silent}

    def __post_init__(self) -> None:
        (first, one), *others = self.datasets.items()
        for name, dataset in others:
            if dataset.tokenizer_fingerprint != one.tokenizer_fingerprint:
                raise Refused(
                    f"data.train.{name} = {dataset.path} was built with another tokenizer than "
                    f"data.train.{first} = {one.path}"
                )

    @property
    def first(self) -> TokenDataset:
        """One of them, for what all have in common: tokenizer, special ids, vocabulary."""
        return next(iter(self.datasets.values()))

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each dataset."""
        return {name: dataset.fingerprint for name, dataset in self.datasets.items()}

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return sum(dataset.tokens for dataset in self.datasets.values())

    @property
    def documents(self) -> int:
        """Documents of all."""
        return sum(dataset.documents for dataset in self.datasets.values())

    def view(self, source: int, sequence_length: int) -> View:
        """The rows of one source."""
        key = (source, sequence_length)
        if key not in self._views:
            self._views[key] = open_view(
                list(self.datasets.values())[source], sequence_length, self.packing, self.progress
            )
        return self._views[key]

    def padding_share(self, sequence_length: int) -> float:
        """Share of padding in the rows of all sources together."""
        return 1 - self.tokens / (self.rows(sequence_length) * sequence_length)

    def rows(self, sequence_length: int) -> int:
        """Rows of all sources together."""
        return sum(self.view(source, sequence_length).rows for source in range(len(self.datasets)))

    def gather(self, examples: Examples, sequence_length: int) -> Rows:
        """Rows of any of the sources (-1: a padding row), in the order in which they are named."""
        views = {source: self.view(source, sequence_length) for source in np.unique(examples.sources).tolist()}
        return gather(views, examples.sources, examples.rows, sequence_length)


def open_mixture(
    data: DataConfig, progress: Progress = silent, locate: Callable[[str, Path], Path] = lambda name, path: path
) -> Mixture:
    """The datasets of `data.train`, each from where `locate(name, path)` says that its data are.

    Raises Refused where one is missing, not whole, or unlike the others.
    """
    datasets = {
        name: TokenDataset.open(locate(name, source.path), data.tokenizer, progress)
        for name, source in data.sources.items()
    }
    return Mixture(datasets, data.packing, progress)


def make_order(config: Config, mixture: Mixture, phases: tuple[Phase, ...]) -> Order:
    """The order of a mixture's rows in a run of this config."""
    data, lengths = config.data, {phase.sequence_length for phase in phases}
    sources = tuple(
        Source(
            dataset.fingerprint,
            {length: mixture.view(number, length).rows for length in lengths},
            data.sources[name].max_epochs,
        )
        for number, (name, dataset) in enumerate(mixture.datasets.items())
    )
    return Order(
        seed=config.seed,
        sources=sources,
        phases=phases,
        packing=data.packing,
        shuffle=data.shuffle,
        renormalize=data.when_exhausted == "renormalize",
        skips=tuple(Skip(skip.sequence_length, skip.first, skip.end) for skip in data.skip),
    )


def shares(config: Config, phase: Phase) -> dict[str, float]:
    """The share of each source in a phase, as its period has it."""
    draws = draws_of(phase.weights)
    return {name: count / sum(draws) for name, count in zip(config.data.sources, draws, strict=True)}
