"""What was left out while a corpus was read: counted by reason, and told with file and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxscale.data.build.readers import opened

MALFORMED = "malformed"
"""Reason of whatever cannot be read."""
KEPT_EXAMPLES = 20
"""Places that are told for each reason; all are counted, and malformed ones are all listed."""
BLOCK = 2**22


class Place(NamedTuple):
    """Where something stands in the corpus."""

    address: str
    start: int
    """First byte of the part of the file that was being read."""
    line: int
    """Line (row in Parquet), counted from 1 at `start`."""
    complaint: str = ""
    """What is wrong there, if anything is."""

    def resolved(self) -> str:
        """`FILE:LINE`, with the complaint; reads the file up to `start` to count its lines."""
        return resolve([self])[0]


@dataclass
class Tally:
    """What happened while documents were read."""

    bytes_read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> entries that gave no document."""
    places: dict[str, list[Place]] = field(default_factory=dict)
    """Reason -> the first of them; all that were malformed."""

    def leave_out(self, reason: str, place: Place) -> None:
        """Count one more."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        known = self.places.setdefault(reason, [])
        if reason == MALFORMED or len(known) < KEPT_EXAMPLES:
            known.append(place)

    @staticmethod
    def total(tallies: Iterable[Tally]) -> Tally:
        """All of them together, in the order given."""
        total = Tally()
        for tally in tallies:
            total.bytes_read += tally.bytes_read
            for reason, count in tally.skipped.items():
                total.skipped[reason] = total.skipped.get(reason, 0) + count
                known = total.places.setdefault(reason, [])
                room = None if reason == MALFORMED else KEPT_EXAMPLES - len(known)
                known.extend(tally.places[reason][:room])
        return total


def resolve(places: Sequence[Place]) -> list[str]:
    """`FILE:LINE` of each place, with its complaint. Files that were cut are read once, to count their lines."""
    cuts: dict[str, set[int]] = defaultdict(set)
    for place in places:
        if place.start:
            cuts[place.address].add(place.start)
    before = {
        (address, start): lines
        for address, starts in cuts.items()
        for start, lines in _lines_before(address, sorted(starts))
    }
    texts = []
    for place in places:
        line = place.line + before.get((place.address, place.start), 0)
        texts.append(f"{place.address}:{line}" + (f": {place.complaint}" if place.complaint else ""))
    return texts


def _lines_before(address: str, starts: Sequence[int]) -> Iterable[tuple[int, int]]:
    """For each of the rising offsets into a file, the number of lines that begin before it."""
    lines, position = 0, 0
    with opened(address) as file:
        for start in starts:
            ends_line = True
            while position < start and (block := file.read(min(BLOCK, start - position))):
                lines, position, ends_line = lines + block.count(b"\n"), position + len(block), block.endswith(b"\n")
            yield start, lines + (not ends_line)
