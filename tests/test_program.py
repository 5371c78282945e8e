"""Reading compiled programs: by hand, and off real ones whose products, bytes and loops are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxscale.plan.program import Array, Program, arrays_of, elements_of, read_program

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,128]{1,0})->f32[8,128]{1,0}}

%fused (param_0.1: f32[8,128], param_1: s32[]) -> f32[1,128] {
  %param_0.1 = f32[8,128]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut.1 = f32[1,128]{1,0} dynamic-slice(%param_0.1, %param_1, %zero), dynamic_slice_sizes={1,128}
}

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%p), index=1, metadata={op_name="jit(step)/while/body/add" source_line=3}
  ROOT %t = (s32[], /*index=1*/f32[8,128]{1,0}) tuple(%i, /*index=1*/%x)
}

ENTRY %main.2 (param.1: f32[8,128]) -> f32[8,128] {
  %param.1 = f32[8,128]{1,0} parameter(0), sharding={devices=[1,8]<=[8]}, metadata={op_name="state.params[\\'w\\']"}
  %c = s32[] constant(0)
  %start.1 = (s32[], f32[8,128]{1,0}) tuple(%c, %param.1)
  %while.1 = (s32[], f32[8,128]{1,0}) while(%start.1), condition=%cond, body=%body, LOOP
  %cut = f32[1,128]{1,0} fusion(%param.1, %c), kind=kLoop, calls=%fused
  %product = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(f32[8,128]{1,0} %param.1, %param.1), PRODUCT
  ROOT %out = f32[8,128]{1,0} get-tuple-element(%while.1), index=1
}
"""
LOOP = 'backend_config={"known_trip_count":{"n":"12"}}'
DIMENSIONS = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}'
PRODUCT = (
    'custom_call_target="__cublas$lt$matmul", '
    f'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{DIMENSIONS}}}}}'
)


@pytest.fixture
def program() -> Program:
    return read_program(TEXT.replace("LOOP", LOOP).replace("PRODUCT", PRODUCT))


def test_computations_and_instructions(program: Program) -> None:
    """Names, opcodes, operands without their shapes and comments, and what comes last."""
    assert set(program.computations) == {"fused", "body", "main.2"} and program.entry.name == "main.2"
    assert [one.opcode for one in program.entry.instructions] == [
        "parameter",
        "constant",
        "tuple",
        "while",
        "fusion",
        "custom-call",
        "get-tuple-element",
    ]
    assert program.entry.root.name == "out"
    assert program.entry.by_name["product"].operands == ("param.1", "param.1")
    assert program.computations["body"].root.operands == ("i", "x")
    fused = program.computations["fused"]
    assert [one.name for one in fused.parameters] == ["param_0.1", "param_1"]
    assert [user.name for user in fused.users["param_0.1"]] == ["cut.1"]


def test_what_an_instruction_says(program: Program) -> None:
    """Arrays of tuples, iterations, targets, lists in both spellings, and where it came from."""
    loop, product, cut = (program.entry.by_name[name] for name in ("while.1", "product", "cut"))
    assert loop.iterations == 12 and cut.iterations is None
    assert loop.called("body") == "body" and list(loop.calls) == [("condition", "cond"), ("body", "body")]
    assert product.target == "__cublas$lt$matmul" and loop.target == ""
    assert product.numbers(r"lhs_contracting_dim\w*") == (1,) and product.numbers(r"lhs_batch_dim\w*") == ()
    assert program.computations["fused"].root.numbers("dynamic_slice_sizes") == (1, 128)
    assert product.arrays == (Array("f32", (8, 8)), Array("s8", (4096,))) and product.bytes == 256 + 4096
    assert program.computations["body"].by_name["x"].origin == "jit(step)/while/body/add"
    assert program.entry.parameters[0].bytes == 8 * 128 * 4


@pytest.mark.parametrize(
    ("shape", "size"),
    [("bf16[3,5]{1,0}", 30), ("pred[7]", 7), ("s4[5]{0}", 3), ("f8e4m3fn[2,2]", 4), ("f32[]", 4), ("token[]", 0)],
)
def test_bytes(shape: str, size: int) -> None:
    assert sum(array.bytes for array in arrays_of(shape)) == size


def test_elements_of_nested_tuples() -> None:
    shape = "(f32[2,4]{1,0:T(8,128)}, /*index=1*/(s32[], f32[3]{0}), bf16[2]{0})"
    assert elements_of(shape) == ["f32[2,4]{1,0:T(8,128)}", "(s32[], f32[3]{0})", "bf16[2]{0}"]


def test_a_real_program() -> None:
    """A scan of 5 products, compiled for the CPU: its loop is found, with its iterations and its product."""

    def step(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 64), (5, 64, 64))]
    found = read_program(jax.jit(step).lower(*shapes).compile().as_text())
    assert [array for one in found.entry.parameters for array in one.arrays] == [
        Array("f32", (16, 64)),
        Array("f32", (5, 64, 64)),
    ]
    (loop,) = [one for one in found.entry.instructions if one.opcode == "while"]
    assert loop.iterations == 5
    inside = [found.computations[loop.called("body")]]
    inside += [found.computations[name] for one in inside[0].instructions for _, name in one.calls]
    products = [one for computation in inside for one in computation.instructions if "dot" in one.opcode + one.target]
    assert any(one.arrays[0] == Array("f32", (16, 64)) for one in products)
