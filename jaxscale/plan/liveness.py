"""What the temporaries of a compiled step are, at the point of the program where most of them are held.

A buffer is held from the instruction that makes it to the last that uses it, under whatever name: tuples and bitcasts
rename, a loop works in the buffers that it is given, and an update in place gives its operand back. The compiler's own
assignment shares and aligns, so its total differs a little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from jaxscale.config.model import ModelConfig
from jaxscale.plan.program import Array, Computation, Instruction, Program

Held = dict[str, int]
"""Bytes by what they are for."""
RENAMES = frozenset({"bitcast", "get-tuple-element", "tuple", "while", "opt-barrier", "add-dependency"})
NOTHING = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id", "iota"})


def parts_of_temporaries(program: Program, model: ModelConfig, sequence_length: int, total: int) -> Held:
    """The temporaries of one device, `total` bytes, by what they are for: `gradients`, `saved_activations` (of the
    forward pass, for the backward pass), `gathered_parameters`, `logits`, and the rest, `temporaries`.

    They are told apart by their shapes; where what was found is more than the total, because the compiler shares
    buffers more cleverly, all are reduced alike.
    """
    shards = {
        array.dimensions
        for one in program.entry.parameters
        if one.origin.startswith("state.params")
        for array in one.arrays
    }
    vocabulary, embed = model.padded_vocabulary, model.embed_dim

    def purpose(array: Array, instruction: Instruction) -> str:
        sizes = array.dimensions
        if vocabulary in sizes and embed not in sizes and array.elements >= sequence_length:
            return "logits"
        if array.dtype == "f32" and (sizes in shards or {vocabulary, embed} <= set(sizes)):
            return "gradients"
        if instruction.opcode.startswith("all-gather") or {vocabulary, embed} <= set(sizes):
            return "gathered_parameters"
        stacked = len(sizes) > 2 and sizes[0] == model.layers
        return "saved_activations" if stacked and sequence_length in sizes else "temporaries"

    held = most_held(program, purpose)
    named = {name: size for name, size in held.items() if name != "temporaries"}
    share = min(1.0, total / max(1, sum(named.values())))
    named = {name: int(size * share) for name, size in named.items()}
    return {**named, "temporaries": total - sum(named.values())}


def most_held(program: Program, purpose: Callable[[Array, Instruction], str]) -> Held:
    """Bytes of the temporaries of one device by `purpose(array, instruction that makes it)`, where they are most."""
    return _most(program.entry, program, purpose)


def _most(computation: Computation, program: Program, purpose: Callable[[Array, Instruction], str]) -> Held:
    """The same of one computation, without what it is given."""
    owners = _owners(computation, program)
    last = _last_uses(computation, owners)
    held: dict[str, Held] = {}
    now: Held = {}
    most: Held = {}
    for position, instruction in enumerate(computation.instructions):
        if owners[instruction.name] == {instruction.name}:
            own: Held = defaultdict(int)
            for array in instruction.arrays:
                own[purpose(array, instruction)] += array.bytes
            held[instruction.name] = own
            _add(now, own, 1)
        inside: Held = {}
        if instruction.opcode == "while":
            inside = _most(program.computations[instruction.called("body")], program, purpose)
        elif instruction.opcode in ("call", "conditional"):
            bodies = [_most(program.computations[name], program, purpose) for _, name in instruction.calls]
            inside = max(bodies, key=lambda one: sum(one.values()))
        if sum(now.values()) + sum(inside.values()) > sum(most.values()):
            most = dict(now)
            _add(most, inside, 1)
        for name in last.get(position, ()):
            if name in held:
                _add(now, held.pop(name), -1)
    return {name: size for name, size in most.items() if size}


def _owners(computation: Computation, program: Program) -> Mapping[str, set[str]]:
    """Of each instruction, the instructions whose buffers its result lies in; none: what the computation is given."""
    owners: dict[str, set[str]] = {}
    for one in computation.instructions:
        given = [owners.get(name, set()) for name in one.operands]
        if one.opcode in NOTHING:
            owners[one.name] = set()
        elif one.opcode in RENAMES or one.opcode.endswith("-done"):
            owners[one.name] = set().union(*given)
        elif (place := _in_place(one, computation, program)) is not None:
            owners[one.name] = owners.get(place, set())
        else:
            owners[one.name] = {one.name}
    return owners


def _in_place(one: Instruction, computation: Computation, program: Program) -> str | None:
    """The operand whose buffer an instruction updates; None if it has a buffer of its own."""
    if one.opcode == "dynamic-update-slice":
        return one.operands[0]
    if one.opcode != "fusion" or "dynamic-update-slice" not in one.name + one.attributes:
        return None
    root = program.computations[one.called("calls")].root
    alike = [name for name in one.operands if computation.by_name[name].arrays == one.arrays]
    return alike[0] if root.opcode in ("dynamic-update-slice", "bitcast") and alike else None


def _last_uses(computation: Computation, owners: Mapping[str, set[str]]) -> Mapping[int, list[str]]:
    """Of each position, the buffers that are used there for the last time; the result's are held to the end."""
    last: dict[str, int] = {}
    for position, one in enumerate(computation.instructions):
        for name in (one.name, *one.operands):
            for owner in owners.get(name, ()):
                last[owner] = position
    for owner in owners[computation.root.name]:
        last[owner] = len(computation.instructions)
    uses: dict[int, list[str]] = defaultdict(list)
    for owner, position in last.items():
        uses[position].append(owner)
    return uses


def _add(total: Held, part: Mapping[str, int], times: int) -> None:
    """Add a part to a total, or with -1 take it away."""
    for name, size in part.items():
        total[name] = total.get(name, 0) + times * size
