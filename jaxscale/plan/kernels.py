"""What one instruction of a compiled GPU program costs: which kernel it is, and how much that multiplies and moves.

A kernel is a matrix product (cuBLAS, or a fusion around a `dot`), fused attention (cuDNN), or bound by the memory that
it reads and writes (all other fusions, copies, reductions). What only renames memory costs nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Literal

from jaxscale.hardware import Gpu
from jaxscale.plan.cost import attention_seconds, matmul_seconds, memory_seconds
from jaxscale.plan.program import Array, Computation, Instruction, Program

Kind = Literal["matmul", "attention", "memory"]

FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"opt-barrier", "add-dependency", "copy-done", "async-done", "domain"}
)
"""Opcodes that run nothing on the device."""
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""HLO's dtypes in NumPy's words."""


@dataclass(frozen=True)
class Kernel:
    """One launch on the device."""

    kind: Kind
    seconds: float
    flops: float = 0.0
    """Of matrix products and attention."""
    bytes: float = 0.0
    """Read and written."""


def kernel(instruction: Instruction, inside: Computation, program: Program, gpu: Gpu) -> Kernel | None:
    """What an instruction of the computation `inside` launches; None where it launches nothing.

    Collectives, loops and calls are not kernels; they are the replay's.
    """
    if instruction.opcode in FREE:
        return None
    operands = [inside.by_name[name] for name in instruction.operands if name in inside.by_name]
    if instruction.target.startswith("__cublas"):
        return _product(instruction, operands[0].arrays[0], operands[1].arrays[0], gpu)
    if "fmha" in instruction.target:
        return _attention(instruction, gpu)
    if instruction.opcode == "dot":
        return _product(instruction, operands[0].arrays[0], operands[1].arrays[0], gpu)
    if instruction.opcode == "fusion":
        return _fusion(instruction, operands, program, gpu)
    moved = _moved(instruction, [operand.bytes for operand in operands])
    return Kernel("memory", memory_seconds(gpu, moved), bytes=moved)


def _fusion(instruction: Instruction, operands: list[Instruction], program: Program, gpu: Gpu) -> Kernel:
    """A fusion: bound by its products, if it has some, or by what it moves."""
    fused = program.computations[instruction.called("calls")]
    moved = float(sum(_read(fused, parameter) for parameter in fused.parameters) + _written(fused))
    products = []
    for one in fused.instructions:
        if one.opcode == "dot":
            left, right = (fused.by_name[operand].arrays[0] for operand in one.operands[:2])
            products.append(_product(one, left, right, gpu))
    seconds, flops = sum(one.seconds for one in products), sum(one.flops for one in products)
    kind: Kind = "matmul" if products else "memory"
    return Kernel(kind, max(seconds, memory_seconds(gpu, moved)), flops, moved)


def _product(instruction: Instruction, left: Array, right: Array, gpu: Gpu) -> Kernel:
    """A matrix product, by its operands and the dimensions that it contracts and goes through batch by batch."""
    contracted, batch = instruction.numbers("lhs_contracting_dim\\w*"), instruction.numbers("lhs_batch_dim\\w*")
    depth = math.prod(left.dimensions[dimension] for dimension in contracted)
    batches = math.prod(left.dimensions[dimension] for dimension in batch)
    rows, columns = (array.elements // max(1, depth * batches) for array in (left, right))
    dtype = "float8" if left.dtype.startswith("f8") else DTYPES.get(left.dtype, "float32")
    seconds = matmul_seconds(gpu, rows, columns, depth, dtype, batches)
    moved = left.bytes + right.bytes + instruction.arrays[0].bytes
    return Kernel("matmul", seconds, 2.0 * batches * rows * columns * depth, moved)


def _attention(instruction: Instruction, gpu: Gpu) -> Kernel:
    """cuDNN's fused attention: `[rows, heads, queries, keys]` scores that are never written."""
    settings = json.loads(_braces(instruction.attributes, "backend_config="))["cudnn_fmha_backend_config"]
    rows, heads, queries, keys = map(int, settings["intermediate_tensor_shape"]["dimensions"])
    shapes = re.findall(r"(\w+)\[([\d,]+)\]", _braces(instruction.attributes, "operand_layout_constraints="))
    # Queries, keys and values are `[rows, tokens, heads, head_dim]`, whatever their layout in memory.
    arrays = [Array(dtype, tuple(map(int, dimensions.split(",")))) for dtype, dimensions in shapes]
    head_dim = arrays[0].dimensions[3]
    causal, backward = "CAUSAL" in settings["mask_type"], "Backward" in instruction.target
    window = int(settings.get("sliding_window_length", 0))
    seconds = attention_seconds(
        gpu,
        rows,
        heads,
        queries,
        min(keys, window) if window else keys,
        head_dim,
        causal=causal and not window,
        dtype=DTYPES[arrays[0].dtype],
        backward=backward,
    )
    flops = (10.0 if backward else 4.0) * rows * heads * queries * keys * head_dim * (0.5 if causal else 1.0)
    return Kernel("attention", seconds, flops, sum(array.bytes for array in arrays) + instruction.bytes)


def _moved(instruction: Instruction, operands: list[int]) -> float:
    """Bytes that an instruction outside of fusions reads and writes."""
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * instruction.bytes
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 2.0 * operands[1]
    return float(instruction.bytes + sum(operands))


def _read(fused: Computation, parameter: Instruction) -> int:
    """Bytes that a fusion reads of one of its operands: the parts that it cuts out, or all of it."""
    read, names = 0, [parameter.name]
    while names:
        name = names.pop()
        for user in fused.users.get(name, ()):
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                read += user.bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # updated in place: what is not overwritten is not read
            else:
                return parameter.bytes
    return min(read, parameter.bytes)


def _written(fused: Computation) -> int:
    """Bytes that a fusion writes: of what is updated in place, the update."""
    results = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    written = 0
    for name in results:
        result = fused.by_name[_stands_for(fused, name)]
        if result.opcode == "dynamic-update-slice":
            written += fused.by_name[result.operands[1]].bytes
        else:
            written += result.bytes
    return written


def _stands_for(fused: Computation, name: str) -> str:
    """The instruction whose memory a chain of bitcasts renames."""
    while fused.by_name[name].opcode == "bitcast":
        name = fused.by_name[name].operands[0]
    return name


def _braces(text: str, key: str) -> str:
    """The text in braces, with them, that follows a key."""
    begin = text.index(key) + len(key)
    depth = 0
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin : end + 1]
    raise ValueError(f"{key} is not closed")
