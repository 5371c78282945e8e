"""Configs compared, named by a fingerprint, written as TOML, and described as JSON Schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from jaxscale.config.schema import Config
from jaxscale.config.section import Section


@dataclass(frozen=True)
class Change:
    """A key whose value differs; a side that lacks the key has None."""

    key: str
    old: Any
    new: Any


def flatten(config: Config) -> dict[str, Any]:
    """Every dotted key with its value as in JSON; sections that are None count as a value."""
    return dotted(config.model_dump(mode="json"))


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of any depth under dotted keys; an empty mapping counts as a value."""
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else name)
        else:
            flat[key] = value

    walk(values, "")
    return flat


def diff(old: Config, new: Config) -> list[Change]:
    """The keys whose values differ, in the order of the schema."""
    return compare(flatten(old), flatten(new))


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The same for values that are flat already, such as those that a checkpoint stores."""
    keys = dict.fromkeys((*before, *after))
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def fingerprint(config: Config) -> str:
    """sha256 (hex) of all values, defaults included; equal configs have equal fingerprints."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()


def to_toml(config: Config) -> str:
    """The whole config as TOML that `load` reads back to an equal one."""
    return tomli_w.dumps(_table(config))


def _table(section: Section) -> dict[str, Any]:
    """A section as a TOML table. TOML has no null: an unset key is left out, or "none" where it is set by default."""
    dumped = section.model_dump(mode="json")
    table: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is not None:
            table[name] = _toml(value, dumped[name])
        elif field.get_default(call_default_factory=True) is not None:
            table[name] = "none"
    return table


def _toml(value: Any, dumped: Any) -> Any:
    """A value as TOML; `dumped` is its JSON form, right for all but sections."""
    match value:
        case Section():
            return _table(value)
        case dict():
            return {name: _toml(inner, dumped[name]) for name, inner in value.items()}
        case tuple():
            return [_toml(inner, dumped[number]) for number, inner in enumerate(value)]
        case _:
            return dumped


def json_schema() -> dict[str, Any]:
    """JSON Schema of one TOML file: nothing is required, since it may extend others; "none" unsets an optional key."""
    schema = _for_files(Config.model_json_schema())
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    schema["properties"]["extends"] = {
        "description": "Files that this one is laid over, relative to it; of several the later wins.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return schema


def _for_files(node: Any) -> Any:
    """The schema of what may be written in a file, from the schema of a whole config."""
    if isinstance(node, list):
        return [_for_files(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "null":
        return {"const": "none"}
    return {
        key: _for_files(value)
        for key, value in node.items()
        # Lists under "required" are the keyword; a property of that name would be a table. TOML has no null defaults.
        if not (key == "required" and isinstance(value, list)) and not (key == "default" and value is None)
    }
