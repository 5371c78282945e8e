"""What a run is trained on: the text behind a dataset, the datasets, and how they become rows and batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from jaxscale.config.section import Section
from jaxscale.config.types import (
    AbsolutePath,
    Address,
    NaturalInt,
    PositiveInt,
    Share,
    TokenizerName,
    Weight,
)


class FillInMiddleConfig(Section):
    """Fill in the middle (arXiv 2207.14255): a document is cut in three, and the middle is learned last. Training split
    only; cuts and choices follow from the document's id."""

    rate: Share = 0.5
    """Share of the documents that are rearranged."""
    suffix_first: Share = 0.5
    """Share of these that show the suffix before the prefix (SPM); the others the prefix first (PSM)."""
    prefix: str = "<|fim_prefix|>"
    """The tokenizer's marker of the part before."""
    middle: str = "<|fim_middle|>"
    """Its marker of the middle."""
    suffix: str = "<|fim_suffix|>"
    """Its marker of the part after."""


class SlurmBuildConfig(Section):
    """The job array of a build over many nodes: each element runs one task."""

    partition: str | None = None
    """Partition to submit to; needed where executor = "slurm"."""
    time: str = "24:00:00"
    """Time limit of one element of the array."""
    cpus: PositiveInt = 1
    """CPUs of one element."""
    memory_gb: PositiveInt = 4
    """Memory for each CPU, in GB."""
    options: dict[str, str] = Field(default_factory=dict)
    """Other options of sbatch by their long names, such as `account = "abc"`."""


class BuildConfig(Section):
    """How to build the token dataset `data.train` (and a validation split) from text; used by `jaxscale data build`,
    and by `jaxscale train` where the dataset is not there yet."""

    files: tuple[Address, ...] = ()
    """Globs of files, here or at any address that fsspec knows (`s3://bucket/**/*.jsonl.zst`)."""
    corpus: Literal["python-stdlib"] | None = None
    """A corpus found on every machine instead of files: the source code of the interpreter's standard library."""
    format: Literal["jsonl", "parquet", "text"] | None = None
    """What every file is; unset: by its name, `.jsonl` (one document a line), `.parquet` (one a row), else text (one
    document). JSONL and text may be compressed (`.gz`, `.zst`)."""
    text_field: str = "text"
    """Key of the text in a JSONL object, or column of a Parquet file."""
    tokenizer: TokenizerName = "bytes"
    """`bytes` (built in) or the path of a `tokenizer.json`."""
    train_vocabulary: PositiveInt | None = None
    """Where the file `tokenizer` does not exist yet: train a byte-level BPE of this many ids and save it there."""
    begin_marker: bool = False
    """Start each document with the tokenizer's begin marker; its end marker always closes it."""
    validation_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of documents held out by a hash of their ids, written to the one split of data.validation."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do with a line or file that cannot be read: stop and name it, or skip, count and list it."""
    keep: str | None = None
    """Keep only documents whose fields fulfil this, such as `language == "en" and score >= 0.5`."""
    min_characters: NaturalInt = 0
    """Leave out shorter documents."""
    max_characters: PositiveInt | None = None
    """Leave out longer documents."""
    remove_duplicates: bool = False
    """Of documents that differ in nothing but blanks keep the first one of the corpus."""
    fill_in_middle: FillInMiddleConfig | None = None
    """Rearrange documents so that the model learns to fill in (for code)."""
    shard_tokens: PositiveInt = 2**28
    """Most tokens in one shard file, unless a single document has more."""
    task_bytes: PositiveInt | None = None
    """Bytes of input in one task, which is what is done again after a kill; unset: a 1024th of the corpus, but at least
    64 MiB and at most 1 GiB. A compressed or Parquet file is never split."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """Where tasks run: in processes of this machine, in a SLURM job array, or on a Ray cluster. Changes no result."""
    workers: PositiveInt | None = None
    """Tasks that run at one time; unset: one a CPU of this machine, or what the cluster gives. Changes no result."""
    slurm: SlurmBuildConfig = SlurmBuildConfig()
    """Read where executor = "slurm"."""


class SourceConfig(Section):
    """One token dataset of a mixture."""

    path: AbsolutePath
    """Folder of the token dataset, or a token file of another program."""
    weight: Weight = 1.0
    """Its share of the rows, and so of the tokens, over the sum of all weights; 0: never drawn."""
    max_epochs: float | None = Field(default=None, gt=0)
    """Most passes over it in the run, for each sequence length; unset: as many as its weight asks for."""


def _kind(value: object) -> str:
    """What `data.train` or a validation set is: the path of one dataset, or several by name."""
    return "mixture" if isinstance(value, Mapping) else "path"


class SkipConfig(Section):
    """Rows that the run leaves out: places in the order of one sequence length, which move up what follows."""

    sequence_length: PositiveInt
    """The order that is meant: of rows of this length."""
    first: NaturalInt
    """First place left out; 0 is the first row of the run at this length."""
    end: Annotated[PositiveInt, Field(le=2**62)]
    """The place after the last one left out."""


class DataConfig(Section):
    """Where the tokens are and how they are cut into rows."""

    train: Annotated[
        Annotated[AbsolutePath, Tag("path")] | Annotated[dict[str, SourceConfig], Tag("mixture")],
        Discriminator(_kind),
    ]
    """Folder of the token dataset to train on, or a mixture: datasets by name, each with its weight."""
    validation: dict[
        str,
        Annotated[
            Annotated[AbsolutePath, Tag("path")] | Annotated[dict[str, AbsolutePath], Tag("mixture")],
            Discriminator(_kind),
        ],
    ] = Field(default_factory=dict)
    """Named sets to evaluate on: a token dataset, or several by name, each of which is then reported, too."""
    tokenizer: TokenizerName | None = None
    """Tokenizer of token files that carry none (those of other programs): `bytes` or a `tokenizer.json`."""
    sequence_length: PositiveInt = 1024
    """Tokens in a row."""
    packing: Literal["end_to_end", "best_fit", "one_a_row"] = "end_to_end"
    """How documents become rows. `end_to_end`: laid end to end and cut; `best_fit`: planned, none is cut that fits a
    row; `one_a_row`: one document a row, padded."""
    when_exhausted: Literal["stop", "renormalize"] = "stop"
    """When a source has had its `max_epochs`: end the run there (exit code 4), or go on with the other sources."""
    skip: tuple[SkipConfig, ...] = ()
    """Rows to leave out, such as those behind a loss spike."""
    attend_across_documents: bool = False
    """Let attention and positions run over document boundaries inside a row."""
    shuffle: bool = True
    """Visit the rows of each epoch in a new pseudo-random order; false: in stored order."""
    accept_change: bool = False
    """On resume, go on with another dataset, seed or order than the checkpoint's, at the same cursor."""
    build: BuildConfig | None = None
    """How to build the dataset where it does not exist yet."""
    stage_to: AbsolutePath | None = None
    """A folder on a disk of each host, to which the training data are copied before the run; later runs find them."""
    stage_limit_gb: float | None = Field(default=None, gt=0)
    """Most gigabytes of copies in that folder, for which unused ones are removed; unset: none is ever removed."""
    stage_tree: bool = False
    """Hosts pass the data on to each other, so that only the first reads the shared storage."""
    workers: NaturalInt | Literal["auto"] = 0
    """Processes that gather batches; 0: the training process does. `auto`: workers, read_threads and read_ahead are
    measured when the run starts, as `jaxscale data bench` does."""
    read_threads: PositiveInt = 1
    """Threads that gather batches, in each worker."""
    read_ahead: PositiveInt = 4
    """Batches gathered, and sent to the devices, ahead of the step."""

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The datasets to train on, by name, in the order of their names."""
        if isinstance(self.train, Path):
            return {"train": SourceConfig(path=self.train)}
        return dict(sorted(self.train.items()))

    @property
    def datasets(self) -> list[Path]:
        """All that is trained and evaluated on."""
        validation = (path for data in self.validation_sets.values() for path in data.values())
        return [*(source.path for source in self.sources.values()), *validation]

    @property
    def validation_sets(self) -> dict[str, dict[str, Path]]:
        """The datasets of each set to evaluate on, by name; one that stands for itself has the name of its set."""
        return {
            name: {name: data} if isinstance(data, Path) else dict(sorted(data.items()))
            for name, data in self.validation.items()
        }

    @property
    def held_out(self) -> Path | None:
        """Where the documents go that a build holds out: of the validation splits that are one dataset the only one, or
        the one that is called "validation"; None if there is neither."""
        single = {name: data for name, data in self.validation.items() if isinstance(data, Path)}
        only = next(iter(single.values())) if len(single) == 1 else None
        return single.get("validation", only)
