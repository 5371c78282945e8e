"""What is stored of a document: text to be encoded, between markers; for code also with the middle last."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.config.data import BuildConfig
from jaxscale.config.errors import Refused
from jaxscale.data.build.corpus import Document
from jaxscale.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Arrangement:
    """How the documents of a build are stored."""

    end: int
    begin: int | None
    """Unset: documents have no begin marker."""
    fill_in_middle: tuple[int, int, int] | None
    """Markers of prefix, middle and suffix."""
    rate: float = 0.0
    suffix_first: float = 0.0

    @staticmethod
    def make(settings: BuildConfig, tokenizer: Tokenizer) -> Arrangement:
        """The arrangement that settings ask for; raises Refused where the tokenizer lacks a marker for it."""
        if settings.begin_marker and tokenizer.begin_id is None:
            raise Refused(f"data.build.begin_marker = true: the tokenizer {settings.tokenizer!r} has no begin marker")
        begin = tokenizer.begin_id if settings.begin_marker else None
        fill = settings.fill_in_middle
        if fill is None:
            return Arrangement(tokenizer.end_id, begin, None)
        ids = []
        for name, token in (("prefix", fill.prefix), ("middle", fill.middle), ("suffix", fill.suffix)):
            found = tokenizer.token_id(token)
            if found is None:
                key = f"data.build.fill_in_middle.{name} = {token!r}"
                raise Refused(f"{key}: the tokenizer {settings.tokenizer!r} has no such token")
            ids.append(found)
        return Arrangement(tokenizer.end_id, begin, (ids[0], ids[1], ids[2]), fill.rate, fill.suffix_first)

    def of(self, document: Document, held_out: bool) -> list[int | str]:
        """Markers and texts in the order in which they are stored; held-out documents are never rearranged."""
        begin = [] if self.begin is None else [self.begin]
        if held_out or self.fill_in_middle is None or chance("fill in the middle", document.id) >= self.rate:
            return [*begin, document.text, self.end]
        prefix, middle, suffix = self.fill_in_middle
        edges = sorted(int(chance(cut, document.id) * (len(document.text) + 1)) for cut in ("one cut", "other cut"))
        before, inside, after = (
            document.text[first:end] for first, end in zip([0, *edges], [*edges, None], strict=True)
        )
        if chance("suffix first", document.id) < self.suffix_first:
            return [*begin, prefix, suffix, after, middle, before, inside, self.end]
        return [*begin, prefix, before, suffix, after, middle, inside, self.end]


def encoded(arranged: Sequence[list[int | str]], tokenizer: Tokenizer) -> list[np.ndarray | None]:
    """Stored ids of documents, `[tokens]` of the tokenizer's `dtype`; None where its normaliser left nothing."""
    texts = iter(tokenizer.encode_batch([part for parts in arranged for part in parts if isinstance(part, str)]))
    found: list[np.ndarray | None] = []
    for parts in arranged:
        arrays = [next(texts) if isinstance(part, str) else np.array([part], tokenizer.dtype) for part in parts]
        empty = not any(len(ids) for ids, part in zip(arrays, parts, strict=True) if isinstance(part, str))
        found.append(None if empty else np.concatenate(arrays))
    return found


def chance(purpose: str, text: str) -> float:
    """A number in [0, 1) that looks random and is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {text}".encode()).digest()[:6], "big") / 2.0**48
