"""The rules of [data.build]: what cannot be right is known before a file of the corpus is touched."""

from __future__ import annotations

from collections.abc import Iterator

from jaxscale.config.data import BuildConfig
from jaxscale.config.errors import WrongValue
from jaxscale.config.expression import Expression


def build_mistakes(build: BuildConfig) -> Iterator[WrongValue]:
    """Everything in the section that contradicts itself."""
    if not build.files and build.corpus is None:
        yield WrongValue(
            "data.build", None, 'data.build.files or data.build.corpus must say what to read, e.g. "python-stdlib"'
        )
    if build.files and build.corpus is not None:
        allowed = "only one of data.build.files and data.build.corpus; leave one out"
        yield WrongValue("data.build.corpus", build.corpus, allowed)
    yield from _documents(build)
    if build.train_vocabulary is not None and build.tokenizer == "bytes":
        allowed = "data.build.tokenizer must name the tokenizer.json to write; the built-in bytes are not trained"
        yield WrongValue("data.build.train_vocabulary", build.train_vocabulary, allowed)
    if build.fill_in_middle is not None and build.tokenizer == "bytes":
        allowed = "needs a tokenizer.json with markers for it; the built-in bytes have none"
        yield WrongValue("data.build.fill_in_middle", None, allowed)
    if build.executor == "slurm" and build.slurm.partition is None:
        yield WrongValue("data.build.slurm.partition", None, 'is missing; executor = "slurm" submits to it')


def _documents(build: BuildConfig) -> Iterator[WrongValue]:
    """Filters can be read, and let something through."""
    if build.keep is not None:
        try:
            Expression(build.keep)
        except ValueError as error:
            yield WrongValue("data.build.keep", build.keep, str(error))
        if build.corpus is not None or build.format == "text":
            yield WrongValue("data.build.keep", build.keep, "plain text has no fields; leave it out")
    if build.max_characters is not None and build.max_characters < build.min_characters:
        allowed = f"must be at least data.build.min_characters = {build.min_characters}"
        yield WrongValue("data.build.max_characters", build.max_characters, allowed)
