"""A compiled program as data: the computations of its text, and their instructions in the order of execution.

What is read is `compiled.as_text()`, for CPUs and for GPUs. It is made of computations, one instruction a line; the
entry calls the others, and loops carry their number of iterations:

    %body.1 (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
      %all-gather.1 = f32[8,128]{1,0} all-gather(%p.1), replica_groups=[2,4]<=[8], dimensions={0}
    }
    ENTRY %main (...) -> ... {
      %while.1 = (...) while(%tuple), condition=%cond, body=%body.1, backend_config={"known_trip_count":{"n":"4"}}
    }
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Array(NamedTuple):
    """Dtype, in HLO's words (`bf16`), and dimensions of an array."""

    dtype: str
    dimensions: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """Size; 0 for what is no array, such as a token."""
        # f32, bf16, s4, f8e4m3fn: the first number is the width; a truth value takes a byte.
        width = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" else int(width[0]) if width else 0
        return math.ceil(bits * self.elements / 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    name: str
    shape: str
    """Of the result, as text: `f32[8,128]{1,0}`; a tuple's in parentheses."""
    opcode: str
    operands: tuple[str, ...]
    """Names of the instructions whose results it takes."""
    attributes: str
    """What follows the operands."""
    is_root: bool
    """Whether its result is that of the computation."""

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result; a tuple's, nested or not, in order."""
        return arrays_of(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def calls(self) -> Iterator[tuple[str, str]]:
        """What it calls: (how, such as `body`; name of the computation)."""
        for call in _CALLS.finditer(self.attributes):
            for name in re.findall(r"[\w.-]+", call["names"]):
                yield call["how"], name

    def called(self, how: str) -> str:
        """The one computation that it calls so."""
        return next(name for key, name in self.calls if key == how)

    @property
    def iterations(self) -> int | None:
        """Of a loop, how often its body runs; None where that is not known."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """Of a custom call, what is called; else empty."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    @property
    def origin(self) -> str:
        """The operation of the traced function that it came from, such as `jit(step)/while/body/dot_general`."""
        found = _ORIGIN.search(self.attributes)
        return found[1] if found else ""

    def numbers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute that is a list, `key={0,1}` or `"key":["0","1"]`; none if it is not there."""
        found = re.search(rf'\b{key}"?\s*[=:]\s*[\[{{]([^\]}}]*)[\]}}]', self.attributes)
        return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()


@dataclass(frozen=True)
class Computation:
    """Instructions; of a scheduled program in the order in which they are executed."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters in the order of the call's operands."""
        found = [one for one in self.instructions if one.opcode == "parameter"]
        return tuple(sorted(found, key=lambda one: int(one.operands[0])))

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(one for one in self.instructions if one.is_root)

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Of each instruction that is an operand, those that take it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}


@dataclass(frozen=True)
class Program:
    """A module."""

    computations: Mapping[str, Computation]
    entry: Computation


def read_program(text: str) -> Program:
    """The program that `text`, a compiled module's, describes."""
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", []
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            if instruction := _instruction(line):
                instructions.append(instruction)
        elif header := _HEADER.match(line):
            name, instructions = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(instructions))
    return Program(computations, computations[entry])


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The arrays in the text of a shape."""
    return tuple(
        Array(dtype, tuple(map(int, re.findall(r"\d+", dimensions)))) for dtype, dimensions in _ARRAY.findall(shape)
    )


def elements_of(shape: str) -> list[str]:
    """The shapes in a tuple's: "(f32[2,4]{1,0}, (s32[]))" has two."""
    return _split(re.sub(r"/\*.*?\*/", "", shape)[1:-1])


_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
"""First line of a computation: `%name (parameters) -> shape {`."""
_NAME = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r" ?([a-z][a-z0-9-]*)\(")
_OPERAND = re.compile(r"%?([\w.-]+)$")
_CALLS = re.compile(
    r"(?P<how>calls|to_apply|body|condition|true_computation|false_computation|(?:branch|called)_computations)="
    r"(?P<names>\{[^}]*\}|%?[\w.-]+)"
)
"""The computations that an instruction calls: `body=%name` or `branch_computations={%name, %name}`."""
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
"""Dtype and dimensions of an array: `bf16[8,<=128]`, where <= bounds a dimension that is known at run time only."""


def _instruction(line: str) -> Instruction | None:
    """The instruction on a line; None where there is none."""
    named = _NAME.match(line)
    if named is None:
        return None
    begin = named.end()
    end = _closing(line, begin) + 1 if line[begin] == "(" else line.index(" ", begin)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    last = _closing(line, opcode.end() - 1)
    inner = line[opcode.end() : last]
    parts = [inner] if opcode[1] in ("parameter", "constant") else _split(re.sub(r"/\*.*?\*/", "", inner))
    operands = tuple(found[1] for part in parts if (found := _OPERAND.search(part)))
    return Instruction(named[2], line[begin:end], opcode[1], operands, line[last + 1 :], bool(named[1]))


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis closes that opens at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _split(text: str) -> list[str]:
    """The parts of a list that commas outside of all brackets separate."""
    parts, depth = [""], 0
    for piece in re.split(r"([()\[\]{},])", text):
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]
