"""The keys that a config may hold, and the one nearest to a key that it may not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxscale.config.schema import Config
from jaxscale.config.section import Section

COMMON_NAMES = {
    "accumulation_steps": "batch.microbatch",
    "batch_size": "batch.global_size",
    "context_length": "data.sequence_length",
    "epochs": "train.epochs",
    "global_batch_size": "batch.global_size",
    "gradient_accumulation_steps": "batch.microbatch",
    "hidden_size": "model.embed_dim",
    "intermediate_size": "model.mlp_dim",
    "lr": "optimizer.learning_rate",
    "max_steps": "train.steps",
    "micro_batch_size": "batch.microbatch",
    "num_epochs": "train.epochs",
    "num_heads": "model.heads",
    "num_layers": "model.layers",
    "output_dir": "runs_dir",
    "seq_len": "data.sequence_length",
    "vocab_size": "model.vocabulary_size",
    "warmup_steps": "schedule.warmup",
}
"""What other trainers call some of our keys."""


ENTRY = "NAME"
"""Stands in `all_keys` for the name of an entry."""


def _flatten(annotation: Any) -> Iterator[Any]:
    """The members of a union, themselves taken apart and without their metadata; any other type as it is."""
    if get_origin(annotation) is Annotated:
        yield from _flatten(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _flatten(member)
    else:
        yield annotation


def types_of(field: FieldInfo) -> tuple[Any, ...]:
    """The types a field accepts, unions taken apart: `Int | None` gives `(int, NoneType)`."""
    return tuple(_flatten(field.annotation))


def _sections(types: Iterable[Any]) -> list[type[Section]]:
    """The section classes among types."""
    return [kind for kind in types if isinstance(kind, type) and issubclass(kind, Section)]


def _entries(types: Iterable[Any]) -> list[Any]:
    """The types of the entries of the tables of names and lists among types."""
    inner = (kind for outer in types if get_origin(outer) in (dict, tuple) for kind in get_args(outer))
    return [member for kind in inner for member in _flatten(kind)]


def sections_of(field: FieldInfo) -> list[type[Section]]:
    """The section classes a field may hold; empty for a plain value."""
    return _sections(types_of(field))


def is_optional(field: FieldInfo) -> bool:
    """Whether the field may be unset, written "none"."""
    return NoneType in types_of(field)


def has_entries(field: FieldInfo) -> bool:
    """Whether the field is a table of names that the user chooses, or a list."""
    return bool(_entries(types_of(field)))


def entries_of(field: FieldInfo) -> list[type[Section]]:
    """The section classes of the entries of such a table or list; empty where they are plain values."""
    return _sections(_entries(types_of(field)))


def find(key: Sequence[str]) -> FieldInfo | None:
    """The field of a key, None if there is no such key.

    The key of an entry of a table of names, or of a list (`phases.0`), gives the field of the table or list; so does
    the key of an entry of such an entry (`data.validation.SET.SOURCE`).
    """
    types: Sequence[Any] = (Config,)
    field: FieldInfo | None = None
    for part in key:
        if entries := _entries(types):
            types = entries
            continue
        field = next((kind.model_fields[part] for kind in _sections(types) if part in kind.model_fields), None)
        if field is None:
            return None
        types = types_of(field)
    return field


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key a config may hold, sections included, in the order of declaration."""

    def walk(section: type[Section], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield prefix + name
            for inner in sections_of(field):
                yield from walk(inner, f"{prefix}{name}.")
            for inner in entries_of(field):
                yield from walk(inner, f"{prefix}{name}.{ENTRY}.")

    return tuple(dict.fromkeys(walk(Config, "")))


def nearest(key: str) -> list[str]:
    """The valid keys that `key` most likely means, at most three, best first; empty if none comes near.

    In this order: a dash for an underscore, a misspelt section, a misspelt name, the same name in another section,
    the name that other trainers use, anything spelt alike.
    """
    key = key.strip("- ").replace("-", "_")
    section, _, name = key.rpartition(".")
    known = (*all_keys(), "extends")
    if key in known:
        return [key]
    found: list[str] = []
    if section and section not in known:
        found += [moved for right in nearest(section) if (moved := f"{right}.{name}") in known]
    found += difflib.get_close_matches(key, [k for k in known if k.rpartition(".")[0] == section], n=1, cutoff=0.8)
    found += [k for k in known if k.rpartition(".")[2] == name]
    found += [COMMON_NAMES[name]] if name in COMMON_NAMES else []
    by_name = {k.rpartition(".")[2]: k for k in reversed(known)}
    found += [by_name[alike] for alike in difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)]
    found += difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return list(dict.fromkeys(found))[:3]
