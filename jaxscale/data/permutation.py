"""A pseudo-random permutation of any length, computed index by index: no table, the same cost at 10^3 and at 10^15."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

ROUNDS = 6
"""Rounds of the Feistel network, an even number; four make a pseudo-random permutation (Luby and Rackoff, 1988)."""


@lru_cache(maxsize=4096)
def permutation_key(name: str) -> np.ndarray:
    """`[ROUNDS] uint64` of the Philox stream that `name` seeds: equal names, equal permutations."""
    entropy = int.from_bytes(hashlib.sha256(name.encode()).digest(), "little")
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
