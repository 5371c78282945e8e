"""metrics.jsonl: one JSON object a line, each step at most once, whatever was killed when.

A number that is not finite has no form in JSON: it is written as null, and the line then carries `"finite": false`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from jaxscale.data.files import replace_file


class MetricsFile:
    """Appends lines; only process 0 has one. Each line is handed to the operating system before `write` returns."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Open `path`, keeping the lines up to `resume_step`: what came later will be trained, and written, again.

        A half-written last line, left by a kill, is dropped too. `resume_step` 0 keeps nothing.
        """
        self.path = path
        kept = [line for line in read(path) if line["step"] <= resume_step]
        replace_file(path, "".join(_encode(line) + "\n" for line in kept).encode())
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; it needs the key `step`. Validation lines carry the key `split`."""
        self._file.write(_encode(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; no line may follow."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file, in order; empty if there is no file. Safe while a run is writing to it."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _encode(line: Mapping[str, Any]) -> str:
    """One line of strict JSON."""
    finite = {key: not isinstance(value, float) or math.isfinite(value) for key, value in line.items()}
    clean = {key: value if finite[key] else None for key, value in line.items()}
    return json.dumps(clean if all(finite.values()) else {**clean, "finite": False}, allow_nan=False)
