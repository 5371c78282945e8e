"""Which devices take part in a collective, and along which mesh axes: the three forms in which a program says it.

The devices of a program are numbered by their position in the mesh that it was compiled for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")
"""Of a permute: `source_target_pairs={{0,1},{1,0}}`."""
_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d, ]*\},? ?)*)\}")
"""Group by group: `replica_groups={{0,1},{2,3}}`; `{}` is one group of all devices."""
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
"""The rows of a matrix, here 4 x 2, that holds the devices in an order: `replica_groups=[4,2]<=[2,2,2]T(1,0,2)`."""
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
"""Axes of a mesh of the program's own: `replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}`."""
_AXIS = re.compile(r"'?([\w.-]+)'?(?:=(\d+)|:\((\d+)\)(\d+))?")
"""`'a'=8`: an axis and its size; `'a'`: all of it; `'a':(2)4`: the part of it of size 4 that follows one of size 2."""
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
"""All devices in an order: counted through, cut into a grid, transposed."""


def participants(line: str, axes: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which the members of a group differ, and the number of members of the largest group.

    A permute's groups are all devices that differ in nothing but the axes along which its data move.

    Args:
        line: the instruction.
        axes: the axes of the mesh, outermost first, and their sizes.
    """
    if moves := _PAIRS.search(line):
        over = _axes_between(_lists(moves[1]), axes)
        return over, math.prod(axes[axis] for axis in over)
    groups = groups_of(line, math.prod(axes.values()))
    return _axes_between([[group[0], member] for group in groups for member in group], axes), max(map(len, groups))


def _axes_between(pairs: list[list[int]], axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the two devices of any pair differ."""
    one, other = (np.unravel_index(ends, tuple(axes.values())) for ends in np.array(pairs, int).reshape(-1, 2).T)
    return tuple(axis for axis, start, end in zip(axes, one, other, strict=True) if (start != end).any())


def groups_of(line: str, devices: int) -> list[list[int]]:
    """The groups of devices that work together; of a permute, its pairs.

    Args:
        line: the instruction.
        devices: how many there are.
    """
    if moves := _PAIRS.search(line):
        return _lists(moves[1])
    if iota := _IOTA.search(line):
        return _ordered(iota[2]).reshape(_integers(iota[1])).tolist()
    if mesh := _MESH.search(line):
        sizes, order, grouped = mesh.groups()
        return _along(sizes, grouped, np.arange(devices) if order is None else _ordered(order)).tolist()
    explicit = _EXPLICIT.search(line)
    return (_lists(explicit[1]) if explicit else []) or [list(range(devices))]


def _along(sizes: str, grouped: str, devices: np.ndarray) -> np.ndarray:
    """The groups (`[groups, members]`) of those that differ only along some axes of a mesh, or along parts of them."""
    parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for axis, _, before, size in _AXIS.findall(grouped):
        parts[axis].append((int(before), int(before) * int(size)) if before else (1, devices.size))
    shape: list[int] = []
    along: list[int] = []
    for axis, size, *_ in _AXIS.findall(sizes):
        # Cut the axis where its parts begin and end.
        cuts = sorted({1, int(size), *(min(cut, int(size)) for part in parts[axis] for cut in part)})
        for low, high in pairwise(cuts):
            if any(begin <= low < end for begin, end in parts[axis]):
                along.append(len(shape))
            shape.append(high // low)
    members = math.prod(shape[dimension] for dimension in along)
    return np.moveaxis(devices.reshape(shape), along, range(-len(along), 0)).reshape(-1, members)


def _ordered(text: str) -> np.ndarray:
    """All devices in the order that `[2,2,2]T(1,0,2)` or the list `0,2,1,3` gives."""
    order = _ORDER.fullmatch(text)
    if order is None:
        return np.array(_integers(text))
    shape = _integers(order[1])
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_integers(order[2])).ravel() if order[2] else grid.ravel()


def _lists(text: str) -> list[list[int]]:
    """The numbers of each pair of braces: "{0,1},{2,3}"."""
    return [_integers(inner) for inner in re.findall(r"\{([^{}]+)\}", text)]


def _integers(text: str) -> list[int]:
    """All whole numbers in a text."""
    return [int(number) for number in re.findall(r"\d+", text)]
