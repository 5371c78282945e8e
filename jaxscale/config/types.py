"""Types of single values: what may be written for them in TOML, and what a Config holds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator


def absolute(path: object) -> Path:
    """`path` with `~` and `$VARIABLES` expanded, made absolute against the working directory. Raises ValueError."""
    if not isinstance(path, str | Path) or not str(path):
        raise ValueError("must be a path, written as text")
    expanded = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$\{?\w+\}?", str(expanded)):
        raise ValueError(f"the environment variable {unset.group()} is not set")
    return Path(os.path.abspath(expanded))


def _whole(value: object) -> object:
    """A float that is a whole number, such as `1e4`, as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tokenizer(name: str) -> str:
    return name if name == "bytes" else str(absolute(name))


Int = Annotated[int, BeforeValidator(_whole)]
"""An integer, also written `1e4`."""
NaturalInt = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
"""An integer of at least 0."""
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
"""An integer of at least 1."""
Seed = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(_whole)]
"""A seed of 32 bits."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A part of a whole, 0 to 1."""
Weight = Annotated[float, Field(ge=0.0)]
"""A share of a mixture, over the sum of all."""
AbsolutePath = Annotated[Path, PlainValidator(absolute, json_schema_input_type=str)]
"""A path, resolved once: see `absolute`."""
Address = Annotated[str, AfterValidator(lambda text: text if "://" in text else str(absolute(text)))]
"""A path or glob, resolved once, or an address such as `s3://bucket/name`, which stays as it is."""
TokenizerName = Annotated[str, AfterValidator(_tokenizer)]
"""`bytes`, or a path that is resolved once."""
