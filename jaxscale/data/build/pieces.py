"""Cutting long texts before they are encoded, without a change of ids."""

from __future__ import annotations

import re
from collections.abc import Iterator

PIECE = 2**16
"""Longest text, in characters, that is handed to the tokenizer library in one piece."""

# One blank between two non-blanks, else a line end before a non-blank, else before the last of several blanks: common
# pre-tokenizers split at all of them anyway.
_CUTS = (re.compile(r"(?<=\S)(?= \S)"), re.compile(r"(?<=\n)(?=\S)"), re.compile(r"(?<=\s)(?= \S)"))


def pieces(text: str, longest: int = PIECE) -> Iterator[str]:
    """Cut a long text so that the time to encode it stays linear in its length and each piece can run on its own core.

    A piece has at most `longest` characters. It ends before the last single blank between two non-blanks in the second
    half of what it could hold; where there is none, after the last line end that no blank follows; where there is none
    either, before the last of several blanks; else at full length. Common pre-tokenizers split at the first three
    anyway, so the ids are those of the whole text; a cut at full length can only make two tokens of one. The rule sees
    nothing but the text.
    """
    start = 0
    while len(text) - start > longest:
        end = start + longest
        cut = next((found for cut in _CUTS if (found := _last(cut, text, end, longest // 2))), end)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _last(pattern: re.Pattern[str], text: str, end: int, most: int) -> int | None:
    """Last match at or before `end`, at most `most` before it; near it first, where it nearly always is."""
    for reach in (256, most):
        found = [match.start() for match in pattern.finditer(text, end - reach, end + 2) if match.start() <= end]
        if found:
            return found[-1]
    return None
