"""Which row of the dataset stands where in the run: pure index arithmetic in NumPy, without tables.

A *cursor* counts the examples that a run has consumed. A *phase* is a stretch of cursors with one global batch and one
sequence length. A *view* is the dataset at one sequence length: it has a row count and epochs of its own, and phases
of one length continue in it. So cursor -> phase -> position in the view -> (epoch, index) -> row, all in closed form:
a run can start anywhere at no cost, and processes, devices and workers cannot enter, since they are not in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from jaxscale.config.errors import Refused

ROUNDS = 6
"""Rounds of the Feistel network, an even number; four make a pseudo-random permutation (Luby and Rackoff, 1988)."""


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with one batch and one sequence length; it lasts until the next phase begins."""

    first_cursor: int
    """Examples consumed before it."""
    global_batch: int
    """Examples an update consumes."""
    sequence_length: int
    """Tokens in a row."""
    weights: tuple[int, ...] = (1,)
    """Share of each source, as whole numbers over their sum."""


def check_phases(phases: Sequence[Phase]) -> None:
    """Raise Refused unless the first phase begins at cursor 0 and each next one a whole number of batches later."""
    if not phases or phases[0].first_cursor != 0:
        raise Refused("phases: the first phase must begin at cursor 0")
    for before, phase in pairwise(phases):
        examples = phase.first_cursor - before.first_cursor
        if examples <= 0 or examples % before.global_batch:
            nearest = before.first_cursor + max(1, round(examples / before.global_batch)) * before.global_batch
            raise Refused(
                f"phases: one that begins at cursor {phase.first_cursor} is not a whole number of batches of "
                f"{before.global_batch} after the one that begins at {before.first_cursor}; the nearest is {nearest}"
            )


def phase_at(phases: Sequence[Phase], cursor: int) -> Phase:
    """The phase that holds at a cursor."""
    return [phase for phase in phases if phase.first_cursor <= cursor][-1]


def cursor_at_step(phases: Sequence[Phase], step: int) -> int:
    """Examples consumed before update number `step` (from 0)."""
    for phase, following in pairwise(phases):
        steps = (following.first_cursor - phase.first_cursor) // phase.global_batch
        if step < steps:
            return phase.first_cursor + step * phase.global_batch
        step -= steps
    return phases[-1].first_cursor + step * phases[-1].global_batch


def steps_between(phases: Sequence[Phase], first: int, last: int) -> int:
    """Updates that lead from cursor `first` to cursor `last`, rounded up to whole updates."""

    def steps_to(cursor: int) -> int:
        ends = [phase.first_cursor for phase in phases[1:]] + [cursor]
        consumed = [min(end, cursor) - phase.first_cursor for phase, end in zip(phases, ends, strict=True)]
        return sum(-(-max(0, n) // phase.global_batch) for phase, n in zip(phases, consumed, strict=True))

    return steps_to(last) - steps_to(first)


@dataclass(frozen=True)
class Order:
    """The order of a dataset's rows in a run: a function of these fields and the cursor alone."""

    fingerprint: str
    """The dataset's fingerprint."""
    seed: int
    rows: Mapping[int, int]
    """Rows of the dataset at each sequence length of the phases."""
    shuffle: bool
    """A new permutation of the rows each epoch; False: stored order."""
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        check_phases(self.phases)

    def rows_of(self, cursors: np.ndarray) -> np.ndarray:
        """Rows (`[n] int64`, indices into the view of the phase) at these cursors (`[n]` integers of one phase)."""
        cursors = np.asarray(cursors, np.int64)
        if not len(cursors):
            return cursors
        phase = phase_at(self.phases, int(cursors.min()))
        if phase != phase_at(self.phases, int(cursors.max())):
            raise ValueError("cursors of more than one phase")
        length = phase.sequence_length
        rows = self.rows[length]
        epoch, index = np.divmod(cursors - phase.first_cursor + self._consumed_before(phase), rows)
        result = index
        if self.shuffle:
            result = np.empty_like(index)
            for number in np.unique(epoch):
                chosen = epoch == number
                key = epoch_key(self.fingerprint, self.seed, length, int(number))
                result[chosen] = permutation(index[chosen], rows, key)
        return result

    def batch(self, cursor: int) -> np.ndarray:
        """Rows of the whole global batch that begins at this cursor, `[global_batch] int64`."""
        return self.rows_of(cursor + np.arange(phase_at(self.phases, cursor).global_batch))

    def _consumed_before(self, phase: Phase) -> int:
        """Examples of the phase's view that earlier phases consumed."""
        index = self.phases.index(phase)
        earlier = pairwise(self.phases[: index + 1])
        return sum(
            following.first_cursor - one.first_cursor
            for one, following in earlier
            if one.sequence_length == phase.sequence_length
        )


@dataclass(frozen=True)
class Spread:
    """So many rows of a dataset, evenly spread over it in stored order, then only padding rows (-1): for evaluation."""

    rows: int
    """Rows of the dataset."""
    wanted: int
    """How many of them; at most `rows`."""
    phases: tuple[Phase]
    """The one phase."""

    def rows_of(self, cursors: np.ndarray) -> np.ndarray:
        """Rows at these cursors, `[n]` integers -> `[n] int64`."""
        cursors = np.asarray(cursors, np.int64)
        return np.where(cursors < self.wanted, cursors * self.rows // self.wanted, -1)


@lru_cache(maxsize=4096)
def epoch_key(fingerprint: str, seed: int, sequence_length: int, epoch: int) -> np.ndarray:
    """`[ROUNDS] uint64` of the Philox stream keyed by the dataset, the seed, the view, the purpose and the epoch."""
    text = f"order of rows {fingerprint} {seed} {sequence_length} {epoch}"
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")
    key = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(ROUNDS)
    key.flags.writeable = False
    return key


def permutation(index: np.ndarray, length: int, key: np.ndarray) -> np.ndarray:
    """Where a pseudo-random permutation of [0, length) takes each index; `[n]` integers -> `[n] int64`.

    A generalised Feistel network is a bijection of a grid of high x low cells whatever its round function. The grid is
    about square and has less than sqrt(length) cells too many; an index that lands there goes through again until it is
    inside (both: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), which is seldom.
    """
    result = np.asarray(index).astype(np.uint64)
    if result.size and int(result.max()) >= length:
        raise IndexError(f"index {int(result.max())} of a permutation of {length}")
    high = math.isqrt(length - 1) + 1
    low = -(-length // high)
    result = _feistel(result, high, low, key)
    while (outside := result >= np.uint64(length)).any():
        result[outside] = _feistel(result[outside], high, low, key)
    return result.astype(np.int64)


def _feistel(value: np.ndarray, high: int, low: int, key: np.ndarray) -> np.ndarray:
    """One pass over `[n] uint64` below high * low: each coordinate in turn moves by a keyed hash of the other."""
    sizes = (np.uint64(high), np.uint64(low))
    one, other = np.divmod(value, sizes[1])
    for number, round_key in enumerate(key):
        # After each round the two swap names, so that the next round moves the other one.
        one, other = other, (one + _hash(other, round_key)) % sizes[number % 2]
    return one * sizes[1] + other


def _hash(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """48 well mixed bits of the keyed value: multiply, fold, multiply, with the constants of MurmurHash3."""
    mixed = (value ^ key) * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return mixed >> np.uint64(16)
