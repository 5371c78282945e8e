"""The collectives of a compiled program: of which kind, over which mesh axes, how often and how large.

The devices of a module are numbered by their position in the mesh it was compiled for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from jaxscale.plan.groups import participants
from jaxscale.plan.program import Instruction, Program, arrays_of, elements_of

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclass(frozen=True)
class Collective:
    """All collectives of a program that have the kind, the axes, the group size and the dtype in common."""

    kind: str
    """One of KINDS."""
    axes: tuple[str, ...]
    """The mesh axes along which the members of a group differ; of a permute, along which data moves."""
    group_size: int
    """Devices that take part in one such collective: the product of the axes' sizes, unless a group is a part of it."""
    dtype: str
    """In HLO's words (`bf16`, `f32`), joined by + where one collective carries arrays of several dtypes."""
    count: int
    """How often an execution of the program runs it: the product of the iterations of all loops around it.

    Each branch of a conditional counts as if it were taken.
    """
    payload_bytes: int
    """Bytes, on one device and over all `count`, of the largest buffer that it reads or writes, tuples summed up.

    That is what is reduced (all-reduce: the result, which is as large as its operand; reduce-scatter: the operand), the
    gathered result of an all-gather, and the result of the others (all-to-all and permute: as large as the operand;
    ragged-all-to-all: the room for what may arrive).
    """
    at_least: bool = False
    """It stands in a loop whose number of iterations is not known, which is counted as one."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends, over all `count`, rounded up.

        In rings of n devices (Patarasuk and Yuan, 2009, doi 10.1016/j.jpdc.2008.09.002) a reduce-scatter and an
        all-gather send (n - 1) / n of the payload, an all-reduce, which is one after the other, twice that. In an
        all-to-all a device keeps its n-th part and sends the rest; in a permute and a broadcast it passes all on once.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload_bytes if self.group_size > 1 else 0
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * self.payload_bytes * (self.group_size - 1) // self.group_size)

    def repeated(self, times: int | None) -> Collective:
        """The same inside a loop of so many iterations; None: of unknown many."""
        if times is None:
            return replace(self, at_least=True)
        return replace(self, count=self.count * times, payload_bytes=self.payload_bytes * times)

    def as_dict(self) -> dict[str, Any]:
        """All facts by name."""
        return {**asdict(self), "sent_bytes": self.sent_bytes}


def collectives(program: Program, axes: Mapping[str, int]) -> list[Collective]:
    """The collectives that one execution of a program runs, those that send most first.

    Equal ones (kind, axes, group size, dtype) are merged into one entry, and an asynchronous one, a pair of `-start`
    and `-done`, is counted once.

    Args:
        program: of one replica, partitioned over a mesh.
        axes: the axes of that mesh, outermost first, and their sizes.
    """

    @cache
    def inside(name: str) -> list[Collective]:
        found = []
        for instruction in program.computations[name].instructions:
            if instruction.opcode.endswith(("-done", "-update")):  # the other end of a -start, which counts
                continue
            if instruction.opcode.removesuffix("-start") in KINDS:
                found.append(collective(instruction, axes))
            else:
                found += [one.repeated(times) for callee, times in _called(instruction) for one in inside(callee)]
        return _merged(found)

    return sorted(inside(program.entry.name), key=lambda one: (-one.sent_bytes, one.kind, one.axes, one.dtype))


def _merged(found: Iterable[Collective]) -> list[Collective]:
    """One entry for all that differ in nothing but count and bytes."""
    alike: dict[Collective, list[Collective]] = defaultdict(list)
    for one in found:
        alike[replace(one, count=0, payload_bytes=0)].append(one)
    return [
        replace(key, count=sum(one.count for one in ones), payload_bytes=sum(one.payload_bytes for one in ones))
        for key, ones in alike.items()
    ]


def _called(instruction: Instruction) -> Iterator[tuple[str, int | None]]:
    """What an instruction calls, and how often."""
    times = 1 if instruction.opcode != "while" else instruction.iterations
    for how, name in instruction.calls:
        # The condition of a loop runs once more than the body: when it says no.
        yield name, times + 1 if how == "condition" and times is not None else times


def collective(instruction: Instruction, axes: Mapping[str, int]) -> Collective:
    """One execution of a collective, or of the start of one, on a mesh of these axes, outermost first."""
    kind = instruction.opcode.removesuffix("-start")
    arrays = arrays_of(_result(instruction))
    over, group_size = participants(instruction.attributes, axes)
    size = sum(array.bytes for array in arrays) * (group_size if kind == "reduce-scatter" else 1)
    return Collective(kind, over, group_size, "+".join(sorted({array.dtype for array in arrays})), 1, size)


def _result(instruction: Instruction) -> str:
    """The shape of what a collective gives, as text.

    An asynchronous start has a tuple of operand, result and more, each itself a tuple if there are several arrays;
    only all-reduce-start gives its result (one array, or a flat tuple of several).
    """
    shape, opcode = instruction.shape, instruction.opcode
    elements = elements_of(shape) if shape.startswith("(") else []
    flat = not elements or not elements[0].startswith("(")
    return shape if not opcode.endswith("-start") or (opcode == "all-reduce-start" and flat) else elements[1]
