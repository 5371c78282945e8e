"""What is held in memory when, against buffers counted by hand."""

from __future__ import annotations

import pytest

from jaxscale.config.model import ModelConfig
from jaxscale.plan.liveness import most_held, parts_of_temporaries
from jaxscale.plan.program import read_program

KIB = 1024
BODY = """\
%put (stack: f32[4,16,16], row: f32[1,16,16], at: s32[]) -> f32[4,16,16] {
  %stack = f32[4,16,16]{2,1,0} parameter(0)
  %row = f32[1,16,16]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %p = f32[4,16,16]{2,1,0} dynamic-update-slice(%stack, %row, %at, %at, %at)
}
%body (t: (s32[], f32[4,16,16])) -> (s32[], f32[4,16,16]) {
  %t = (s32[], f32[4,16,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %s = f32[4,16,16]{2,1,0} get-tuple-element(%t), index=1
  %inner = f32[8,256]{1,0} fusion(%i), kind=kLoop, calls=%c
  %row.1 = f32[1,16,16]{2,1,0} fusion(%inner), kind=kLoop, calls=%c
  %dynamic-update-slice_fusion = f32[4,16,16]{2,1,0} fusion(%s, %row.1, %i), kind=kLoop, calls=%put
  ROOT %r = (s32[], f32[4,16,16]{2,1,0}) tuple(%i, %dynamic-update-slice_fusion)
}
"""
ENTRY = """\
ENTRY %main (w: f32[8,64]) -> f32[8,64] {
  %w = f32[8,64]{1,0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %zero = s32[] constant(0)
  %a = bf16[32,64]{1,0} fusion(%w), kind=kLoop, calls=%c
  %b = bf16[32,64]{1,0} bitcast(%a)
  %start = f32[4,16,16]{2,1,0} fusion(), kind=kLoop, calls=%c
  %in = (s32[], f32[4,16,16]{2,1,0}) tuple(%zero, %start)
  %loop = (s32[], f32[4,16,16]{2,1,0}) while(%in), condition=%cond, body=%body
  %out = f32[4,16,16]{2,1,0} get-tuple-element(%loop), index=1
  %g = f32[8,64]{1,0} fusion(%out, %b), kind=kLoop, calls=%c
  ROOT %new = f32[8,64]{1,0} fusion(%w, %g), kind=kLoop, calls=%c
}
"""


def test_held_at_most() -> None:
    """Inside of the loop: what it works in (4 KiB), what is used after it (4), and its own buffers (8 and 1)."""
    found = most_held(read_program(BODY + ENTRY), lambda array, instruction: instruction.name)
    assert found == {"a": 4 * KIB, "start": 4 * KIB, "inner": 8 * KIB, "row.1": KIB}


@pytest.mark.parametrize("total", [20_000, 6_000])
def test_parts(total: int) -> None:
    """They add up to the compiler's total: what is left over is the rest, what is too much is reduced."""
    model = ModelConfig(vocabulary_size=128, embed_dim=64, layers=4, heads=4, mlp_dim=64)
    program = read_program(BODY.replace("f32[8,256]", "f32[16,128]") + ENTRY)
    found = parts_of_temporaries(program, model, 16, total)
    assert sum(found.values()) == total
    named = {"saved_activations": 4 * KIB, "logits": 8 * KIB}
    share = min(1, total / sum(named.values()))
    assert {name: found[name] for name in named} == {name: int(size * share) for name, size in named.items()}
