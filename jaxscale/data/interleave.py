"""Sources interleaved by weight: one period of draws, laid out once and repeated for ever.

Each source has a whole number of draws in a period. Draw k of a source with w of the period's P places becomes possible
at k P / w and must have happened by (k + 1) P / w; taking the earliest deadline first meets all of them, and so keeps
the count of every source within one draw of its share at every place (Tijdeman, "The chairman assignment problem",
Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

PERIOD = 2**16
"""Longest period."""


class Period(NamedTuple):
    """Which source is drawn at each place of a period of P places."""

    source: np.ndarray
    """`[P] int64`: the source drawn there."""
    earlier: np.ndarray
    """`[P] int64`: how often it was drawn before in the period."""
    places: tuple[np.ndarray, ...]
    """For each source, the places of its draws, ascending."""


def draws_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each source in a period.

    They are exactly in the proportion of the weights, taken as decimals, if a period of at most PERIOD has it; else
    they are the nearest to it of a period of PERIOD, at least one where the weight is not 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= PERIOD:
        return tuple(int(share * length) for share in shares)
    draws = [max(math.floor(share * PERIOD), 1 if share else 0) for share in shares]
    # What is missing goes to those that lost most by rounding down, what is too much is taken from the largest.
    by_loss = sorted(range(len(draws)), key=lambda i: (draws[i] - shares[i] * PERIOD, i))
    for source in by_loss[: max(0, PERIOD - sum(draws))]:
        draws[source] += 1
    while sum(draws) > PERIOD:
        draws[draws.index(max(draws))] -= 1
    return tuple(draws)


@lru_cache(maxsize=64)
def period_of(draws: tuple[int, ...]) -> Period:
    """One period with so many draws of each source, laid out by earliest deadline first."""
    length = sum(draws)
    source = np.empty(length, np.int64)
    earlier = np.empty(length, np.int64)
    waiting = [(0, index, 0) for index, count in enumerate(draws) if count]  # possible from, source, its draw
    possible: list[tuple[int, int, int]] = []  # deadline, source, its draw
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            _, index, draw = heapq.heappop(waiting)
            heapq.heappush(possible, (-(-(draw + 1) * length // draws[index]), index, draw))
        _, index, draw = heapq.heappop(possible)
        source[place], earlier[place] = index, draw
        if draw + 1 < draws[index]:
            heapq.heappush(waiting, ((draw + 1) * length // draws[index], index, draw + 1))
    for array in (source, earlier):
        array.flags.writeable = False
    return Period(source, earlier, tuple(np.flatnonzero(source == index) for index in range(len(draws))))
