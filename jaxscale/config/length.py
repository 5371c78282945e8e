"""Lengths of training in updates, tokens or passes over the data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

from jaxscale.config.schema import Config

Unit = Literal["steps", "tokens", "epochs"]

_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_LENGTH = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE][+]?\d+)?)\s*([kKMBT]?)\s*(step|token|epoch)s?\s*")


@dataclass(frozen=True)
class Length:
    """A number of updates, of tokens (rows x sequence length) or of passes over the dataset's rows."""

    value: Fraction
    """Exact, so that rounding up to whole updates never depends on binary fractions."""
    unit: Unit


def parse_length(text: int | str) -> Length:
    """A count of updates, or a text such as "100 steps", "10M tokens", "1.5B tokens" or "0.5 epochs".

    Raises ValueError saying what is allowed.
    """
    if isinstance(text, int):
        text = f"{text} steps"
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise ValueError(
            'must be a number of updates, at least 0, or a text such as "10M tokens", "0.5 epochs" or "100 steps"'
        )
    number, multiple, unit = match.groups()
    value = Fraction(number.replace("_", "")) * _MULTIPLES[multiple]
    if unit != "epoch" and value.denominator != 1:
        raise ValueError(f"must be a whole number of {unit}s")
    return Length(value, cast(Unit, unit + "s"))


def train_length(config: Config) -> Length:
    """The length of the run; exactly one of the keys of `[train]` is set in a checked config."""
    train = config.train
    if train.steps is not None:
        return Length(Fraction(train.steps), "steps")
    if train.tokens is not None:
        return Length(Fraction(train.tokens), "tokens")
    # The shortest decimal that gives the float is what the person wrote: 0.1 is a tenth.
    return Length(Fraction(str(train.epochs)), "epochs")
