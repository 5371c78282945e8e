"""Reading TOML: `extends` resolved, and for every key the file and line it came from."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxscale.config.errors import Refused

Tree = dict[str, Any]
Key = tuple[str, ...]

_HEADER = re.compile(r"^\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


@dataclass(frozen=True)
class Source:
    """Merged TOML: the values as they are written, and where each key was written last ("FILE:LINE" or "FILE")."""

    tree: Tree
    places: Mapping[Key, str]

    def place(self, key: Sequence[str]) -> str:
        """Where `key`, or the innermost section around it that is written somewhere, was written; else ""."""
        return next((self.places[p] for end in range(len(key), -1, -1) if (p := tuple(key[:end])) in self.places), "")


def read(path: Path, chain: tuple[Path, ...] = ()) -> Source:
    """Read a TOML file over the files it `extends` (relative to itself; of several the later wins; tables are merged).

    Raises Refused for a file that is missing, not TOML, or that extends itself, `chain` being the files that led here.
    """
    path = path.expanduser()
    text = _text(path, chain)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(_syntax_message(path, text, str(error))) from None
    resolved = path.resolve()
    if resolved in chain:
        raise Refused(
            f"{chain[-1]}: extends = {str(path)!r} closes a circle: " + " > ".join(map(str, (*chain, resolved)))
        )
    lines = _lines(text)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise Refused(f"{path}:{lines.get(('extends',), 1)}: extends = {bases!r}: must be a file or a list of files")
    source = Source({}, {})
    for base in bases:
        source = merge(source, read(path.parent / Path(base).expanduser(), (*chain, resolved)))
    return merge(source, Source(tree, {(): str(path)} | {key: f"{path}:{line}" for key, line in lines.items()}))


def merge(below: Source, above: Source) -> Source:
    """`above` laid over `below`: tables are merged, all other values replaced."""

    def over(low: Tree, high: Tree) -> Tree:
        return low | {
            key: over(low[key], value) if isinstance(value, dict) and isinstance(low.get(key), dict) else value
            for key, value in high.items()
        }

    return Source(over(below.tree, above.tree), {**below.places, **above.places})


def _text(path: Path, chain: tuple[Path, ...]) -> str:
    asked_by = f"{chain[-1]}: extends = " if chain else ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{asked_by}{path}: is not UTF-8 text (byte {error.start})") from None
    except IsADirectoryError:
        raise Refused(f"{asked_by}{path}: is a folder; a config is a .toml file{_nearest_file(path / 'x')}") from None
    except OSError as error:
        raise Refused(f"{asked_by}{path}: {error.strerror or error}{_nearest_file(path)}") from None


def _nearest_file(path: Path) -> str:
    """A hint naming the existing .toml file most like `path`, looked for beside it and under ./configs; "" if none."""
    folders = [path.parent, Path("configs")]
    files = sorted({str(f) for i, d in enumerate(folders) if d.is_dir() for f in (d.rglob if i else d.glob)("*.toml")})
    matches = [f for f in files if Path(f).stem == path.stem] or difflib.get_close_matches(str(path), files, 1, 0.5)
    return f"; nearest: {matches[0]}" if matches else ""


def _syntax_message(path: Path, text: str, error: str) -> str:
    """A TOML error with its line number and the line itself, so that a duplicate key is named too."""
    lines = text.rstrip().splitlines() or [""]
    reason, _, where = error.partition(" (at ")
    found = re.search(r"line (\d+)", where)
    number = min(int(found.group(1)), len(lines)) if found else len(lines)
    reason = reason.replace("Cannot overwrite a value", "this key is given twice")
    return f"{path}:{number}: not valid TOML: {reason}: {lines[number - 1].strip()}"


def _lines(text: str) -> dict[Key, int]:
    """The line of each key and table header. Inline tables and text that looks like TOML inside strings are not parsed:
    the numbers only help a person to find the place."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header.group(1))
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(table + _parts(assignment.group(1)), number)
    return lines


def _parts(dotted: str) -> Key:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))
