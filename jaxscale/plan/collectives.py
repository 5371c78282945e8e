"""The collectives of a compiled program: of which kind, over which mesh axes, how often and how large.

What is read is the text of the compiled module (`compiled.as_text()`), for CPUs and for GPUs. It is made of
computations, one instruction a line; the entry calls the others, and loops carry their number of iterations:

    %body.1 (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
      %all-gather.1 = f32[8,128]{1,0} all-gather(%p.1), replica_groups=[2,4]<=[8], dimensions={0}
    }
    ENTRY %main (...) -> ... {
      %while.1 = (...) while(%tuple), condition=%cond, body=%body.1, backend_config={"known_trip_count":{"n":"4"}}
    }

The devices of a module are numbered by their position in the mesh it was compiled for.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from jax.sharding import Mesh

from jaxscale.plan.groups import participants

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


@dataclass
class _Computation:
    """What counts of a computation: its own collectives, and what it calls how often (None: unknown)."""

    own: list[Collective] = field(default_factory=list)
    calls: list[tuple[str, int | None]] = field(default_factory=list)


def collectives(program: str, mesh: Mesh) -> list[Collective]:
    """The collectives that one execution of a compiled module runs, those that send most first.

    Equal ones (kind, axes, group size, dtype) are merged into one entry, and an asynchronous one, a pair of `-start`
    and `-done`, is counted once.

    Args:
        program: text of a compiled HLO module of one replica, partitioned over the mesh.
        mesh: what it was compiled for.
    """
    computations, entry = _read(program, mesh.shape)

    @cache
    def inside(name: str) -> list[Collective]:
        computation = computations[name]
        called = (one.repeated(times) for callee, times in computation.calls for one in inside(callee))
        return _merged([*computation.own, *called])

    return sorted(inside(entry), key=lambda one: (-one.sent_bytes, one.kind, one.axes, one.dtype))


def _merged(found: Iterable[Collective]) -> list[Collective]:
    """One entry for all that differ in nothing but count and bytes."""
    alike: dict[Collective, list[Collective]] = defaultdict(list)
    for one in found:
        alike[replace(one, count=0, payload_bytes=0)].append(one)
    return [
        replace(key, count=sum(one.count for one in ones), payload_bytes=sum(one.payload_bytes for one in ones))
        for key, ones in alike.items()
    ]


_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
"""First line of a computation: `%name (parameters) -> shape {`."""
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?[\w.-]+ = (?P<shape>[^%"]+?) (?P<opcode>[a-z][a-z0-9-]*)\(')
"""Shape and opcode of an instruction: `  ROOT %name = shape opcode(`; a tuple's shape has spaces in it."""
_CALLS = re.compile(
    r"(?P<how>calls|to_apply|body|condition|true_computation|false_computation|(?:branch|called)_computations)="
    r"(?P<names>\{[^}]*\}|%?[\w.-]+)"
)
"""The computations that an instruction calls: `body=%name` or `branch_computations={%name, %name}`."""
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
"""How often the body of a loop runs."""


def _read(program: str, axes: Mapping[str, int]) -> tuple[dict[str, _Computation], str]:
    """The computations of a module by name, and the name of its entry."""
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in program.splitlines():
        if header := _HEADER.match(line):
            is_entry, name = header.groups()
            current = computations[name] = _Computation()
            entry = name if is_entry else entry
        elif instruction := _INSTRUCTION.match(line):
            opcode = instruction["opcode"]
            if opcode.endswith(("-done", "-update")):  # the other end of a -start, which counts
                continue
            if opcode.removesuffix("-start") in KINDS:
                current.own.append(_collective(opcode, instruction["shape"], line, axes))
            else:
                current.calls += _called(opcode, line)
    return computations, entry


def _called(opcode: str, line: str) -> list[tuple[str, int | None]]:
    """What an instruction calls, and how often."""
    trips = _TRIP_COUNT.search(line)
    times = 1 if opcode != "while" else int(trips[1]) if trips else None
    return [
        # The condition of a loop runs once more than the body: when it says no.
        (name, times + 1 if call["how"] == "condition" and times is not None else times)
        for call in _CALLS.finditer(line)
        for name in re.findall(r"[\w.-]+", call["names"])
    ]


def _collective(opcode: str, shape: str, line: str, axes: Mapping[str, int]) -> Collective:
    """One execution of the collective on this line."""
    kind = opcode.removesuffix("-start")
    arrays = [_array(*match.groups()) for match in _ARRAY.finditer(_result(opcode, shape))]
    over, group_size = participants(line, axes)
    size = sum(size for _, size in arrays) * (group_size if kind == "reduce-scatter" else 1)
    return Collective(kind, over, group_size, "+".join(sorted({dtype for dtype, _ in arrays})), 1, size)


_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\]")
"""Dtype and dimensions of an array: `bf16[8,<=128]`, where <= bounds a dimension that is known at run time only."""


def _array(dtype: str, dimensions: str) -> tuple[str, int]:
    """Dtype and bytes of an array."""
    if dtype == "pred":
        bits = 8
    else:  # f32, bf16, s4, f8e4m3fn: the first number is the width; a token has none
        width = re.search(r"\d+", dtype)
        bits = int(width[0]) if width else 0
    return dtype, math.ceil(bits * math.prod(map(int, re.findall(r"\d+", dimensions))) / 8)


def _result(opcode: str, shape: str) -> str:
    """The shape of what a collective gives, as text.

    An asynchronous start has a tuple of operand, result and more, each itself a tuple if there are several arrays;
    only all-reduce-start gives its result (one array, or a flat tuple of several).
    """
    elements = _elements(shape) if shape.startswith("(") else []
    flat = not elements or not elements[0].startswith("(")
    return shape if not opcode.endswith("-start") or (opcode == "all-reduce-start" and flat) else elements[1]


def _elements(shape: str) -> list[str]:
    """The shapes in a tuple's: "(f32[2,4]{1,0}, (s32[]))" has two."""
    parts, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", shape)[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
