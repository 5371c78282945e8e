"""TOML files and `key=value` overrides -> Config: strict, with every mistake of a file told at once, a line each."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxscale.config import keys
from jaxscale.config.check import data_mistakes, mistakes
from jaxscale.config.data import DataConfig
from jaxscale.config.errors import Refused, WrongValue
from jaxscale.config.schema import Config
from jaxscale.config.section import Section
from jaxscale.config.source import Key, Source, Tree, merge, read

COMMAND_LINE = "command line"


def load(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a config file over the files it extends, apply `key=value` overrides, validate and cross-check the result.

    Raises Refused, one line for each mistake.
    """
    source, wrong = _source(Path(path), overrides)
    _refuse([*wrong, *_complaints(source, _validate(source))])
    config = Config.model_validate_json(_json(source.tree))
    _refuse(_placed(source, mistakes(config)))
    return config


def load_data(path: Path | str, overrides: Sequence[str] = ()) -> DataConfig:
    """The `[data]` section of a config file that may lack other sections; those it has must be right.

    Raises Refused, one line for each mistake.
    """
    source, wrong = _source(Path(path), overrides)
    errors = [e for e in _validate(source) if e["type"] != "missing" or len(e["loc"]) > 1 or e["loc"] == ("data",)]
    _refuse([*wrong, *_complaints(source, errors)])
    data = DataConfig.model_validate_json(_json(source.tree["data"]))
    _refuse(_placed(source, data_mistakes(data)))
    return data


def _refuse(lines: Iterable[str]) -> None:
    if text := "\n".join(lines):
        raise Refused(text)


def _source(path: Path, overrides: Sequence[str]) -> tuple[Source, list[str]]:
    """The values of files and overrides, "none" replaced by None where a key is optional; and the wrong overrides."""
    above, wrong = _overrides(overrides)
    source = merge(read(path), above)
    return Source(_unset(source.tree, [Config]), source.places), wrong


def _overrides(arguments: Sequence[str]) -> tuple[Source, list[str]]:
    """`a.b=value` arguments as a source, of a key given twice the later; and a line for each that is wrong."""
    source, wrong = Source({}, {}), []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        parts = tuple(key.strip().split("."))
        if not equals:
            wrong.append(f"{COMMAND_LINE}: {argument!r}: an override is written key=value{_did_you_mean(key)}")
        elif any(part.isdecimal() for part in parts):
            wrong.append(f"{COMMAND_LINE}: {key}: a list is written whole, such as {parts[0]}=[{{...}}, {{...}}]")
        elif keys.find(parts) is None:
            wrong.append(f"{COMMAND_LINE}: {key}: there is no such key{_did_you_mean(key)}")
        else:
            tree: Any = _value(text, parts)
            for part in reversed(parts):
                tree = {part: tree}
            source = merge(source, Source(tree, {parts: COMMAND_LINE}))
    return source, wrong


def _value(text: str, key: Key) -> Any:
    """`text` as a TOML value; as plain text where it is no TOML, or where the key takes text only (`name=7`)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    field = keys.find(key)
    if isinstance(parsed["value"], dict) and len(parsed) == 1 and field is not None and keys.has_entries(field):
        return parsed["value"]
    takes_text = field is not None and {str, Path} & set(keys.types_of(field))
    takes_number = field is not None and {int, float, bool} & set(keys.types_of(field))
    if len(parsed) > 1 or (takes_text and not takes_number and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _unset(tree: Tree, sections: Sequence[type[Section]]) -> Tree:
    """`tree` with None for "none" where a key is optional; entries of a table of names that are "none" are dropped."""
    result: Tree = {}
    for name, value in tree.items():
        field = next((s.model_fields[name] for s in sections if name in s.model_fields), None)
        if field is None:
            result[name] = value
        elif value == "none" and keys.is_optional(field):
            result[name] = None
        elif isinstance(value, dict) and (inner := keys.sections_of(field)):
            result[name] = _unset(value, inner)
        elif isinstance(value, dict) and keys.has_entries(field):
            result[name] = {entry: _unset_entry(v, keys.entries_of(field)) for entry, v in value.items() if v != "none"}
        elif isinstance(value, list):
            result[name] = [_unset_entry(entry, keys.entries_of(field)) for entry in value]
        else:
            result[name] = value
    return result


def _unset_entry(entry: Any, sections: Sequence[type[Section]]) -> Any:
    """The same for one entry of a table of names or a list: a section, a table of names itself, or a plain value."""
    if not isinstance(entry, dict):
        return entry
    return _unset(entry, sections) if sections else {name: value for name, value in entry.items() if value != "none"}


def _json(tree: Tree) -> str:
    """Values as JSON, from which pydantic takes text for paths and lists for tuples while it stays strict otherwise.

    TOML's dates have no JSON form and no key takes one: they become an object, which no key takes either.
    """
    return json.dumps(tree, default=lambda date: {"date": str(date)})


def _validate(source: Source) -> list[ErrorDetails]:
    """What pydantic finds wrong with the values."""
    try:
        Config.model_validate_json(_json(source.tree))
    except ValidationError as error:
        return error.errors()
    return []


def _complaints(source: Source, errors: Sequence[ErrorDetails]) -> Iterator[str]:
    """One line for each wrong key; the several complaints of a union about one value are joined."""
    found: dict[Key, dict[str, None]] = {}
    for error in errors:
        key = _key(error["loc"], source.tree)
        if error["type"] == "union_tag_invalid" and isinstance(error["input"], dict):
            key = (*key, "kind")
        found.setdefault(key, {})[_complaint(error, key)] = None
    for key, complaints in found.items():
        value = _at(source.tree, key)
        shown = None if value is _ABSENT or isinstance(value, dict) else value
        yield f"{source.place(key)}: {WrongValue('.'.join(key), shown, ' or '.join(complaints))}"


def _placed(source: Source, wrong: Iterable[WrongValue]) -> Iterator[str]:
    """The mistakes found by the cross-checks, each with the place of its key."""
    return (f"{source.place(mistake.key.split('.'))}: {mistake}" for mistake in wrong)


_ABSENT = object()


def _at(tree: Any, key: Key) -> Any:
    """The value at `key`, or _ABSENT."""
    for part in key:
        tree = _inner(tree, part)
    return tree


def _inner(tree: Any, part: str | int) -> Any:
    """The entry `part` of a table or, by its number, of a list; _ABSENT if there is none."""
    if isinstance(tree, list) and str(part).isdecimal() and int(part) < len(tree):
        return tree[int(part)]
    return tree.get(part, _ABSENT) if isinstance(tree, dict) else _ABSENT


def _key(location: Sequence[str | int], tree: Any) -> Key:
    """A pydantic location as a key of the file: without the names of union members, which pydantic puts in between."""

    def walk(value: Any) -> Iterator[str]:
        for position, part in enumerate(location):
            inside = _inner(value, part)
            if inside is not _ABSENT or (isinstance(value, dict) and position == len(location) - 1):
                value = inside
                yield str(part)
            elif not isinstance(value, dict):
                return

    return tuple(walk(tree))


def _complaint(error: ErrorDetails, key: Key) -> str:
    """What is wrong with one value, and what is allowed."""
    match error["type"]:
        case "extra_forbidden":
            return "there is no such key" + _did_you_mean(".".join(key))
        case "missing":
            field = keys.find(key)
            return "is missing" + (f": {field.description}" if field and field.description else "")
        case "literal_error":
            return f"must be {error['ctx']['expected']}" + _nearest_value(str(error["input"]), error["ctx"]["expected"])
        case "union_tag_invalid" if isinstance(error["input"], dict):
            return f"must be {error['ctx']['expected_tags']}" + _nearest_value(
                error["ctx"]["tag"], error["ctx"]["expected_tags"]
            )
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type" | "union_tag_invalid":
            return "must be a section, [" + ".".join(key) + "]"
        case _:
            return error["msg"].replace("Input should be", "must be").replace("String should", "must")


def _did_you_mean(key: str) -> str:
    found = keys.nearest(key)
    return f"; nearest: {' or '.join(found)}" if found else f"; sections: {', '.join(Config.model_fields)}"


def _nearest_value(value: str, allowed: str) -> str:
    found = difflib.get_close_matches(value, re.findall(r"'([^']*)'", allowed), n=1)
    return f"; nearest: {found[0]}" if found else ""
