"""Replaying programs: kernels by their shapes, and what waits for what, against times added up by hand."""

from __future__ import annotations

import pytest

from jaxscale.hardware import known
from jaxscale.plan.cost import Group, attention_seconds, collective_seconds, matmul_seconds, memory_seconds
from jaxscale.plan.kernels import Kernel, kernel
from jaxscale.plan.program import Program, read_program
from jaxscale.plan.replay import COMPUTE, LINKS, NETWORK, Replay, replay

CLUSTER = known().cluster("h100-sxm:2x8")
GPU = CLUSTER.gpu
AXES = {"replica": 2, "fsdp": 8}
DIMENSIONS = '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]'
GEMM = f'custom_call_target="__cublas$gemm", backend_config={{"dot_dimension_numbers":{{{DIMENSIONS}}}}}'
WITHIN, ACROSS = "replica_groups=[2,8]<=[16]", "replica_groups=[8,2]<=[2,8]T(1,0)"
"""The groups of fsdp, which are the hosts, and of replica, one device of each host."""
GATHER_BYTES = 2 * 8192 * 4096
"""Of what is gathered below."""


def program(entry: str, others: str = "") -> Program:
    """A program of these instructions; `a` and `b` are bf16[4096,4096]."""
    return read_program(
        f"{others}\nENTRY %main (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {{\n"
        "  %a = bf16[4096,4096]{1,0} parameter(0)\n  %b = bf16[4096,4096]{1,0} parameter(1)\n"
        f"{entry}\n}}\n"
    )


def replayed(entry: str, others: str = "") -> Replay:
    """What a replay of these instructions adds up."""
    return replay(program(entry, others), CLUSTER, AXES, lambda origin: "/optimizer/" in origin)


def only(entry: str, others: str = "") -> Kernel:
    """The kernel of the last instruction."""
    read = program(entry, others)
    found = kernel(read.entry.instructions[-1], read.entry, read, GPU)
    assert found is not None
    return found


PRODUCT = f"  %NAME = (bf16[4096,4096]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), {GEMM}\n"
PRODUCT_SECONDS = matmul_seconds(GPU, 4096, 4096, 4096, "bfloat16")
GATHER = (
    f"  %gather = (bf16[1024,4096]{{1,0}}, bf16[8192,4096]{{1,0}}) all-gather-start(%a), dimensions={{0}}, {WITHIN}\n"
)
GATHERED = "  %gathered = bf16[8192,4096]{1,0} all-gather-done(%gather)\n"
GATHER_SECONDS = collective_seconds(CLUSTER, "all-gather", GATHER_BYTES, Group(8, 8))


def products(*names: str) -> str:
    return "".join(PRODUCT.replace("NAME", name) for name in names)


def test_a_product() -> None:
    """Its FLOPs by hand; the workspace that cuBLAS asks for is not moved."""
    found = only(products("p"))
    assert found == Kernel("matmul", PRODUCT_SECONDS, 2 * 4096**3, 3 * 2 * 4096**2)


def test_products_in_fusions_and_by_batches() -> None:
    """A dot inside of a fusion, in 8 batches, is found with its dimensions."""
    others = (
        "%fused (x: bf16[8,512,1024], y: bf16[8,1024,256]) -> bf16[8,512,256] {\n"
        "  %x = bf16[8,512,1024]{2,1,0} parameter(0)\n  %y = bf16[8,1024,256]{2,1,0} parameter(1)\n"
        "  ROOT %dot = bf16[8,512,256]{2,1,0} dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}\n}\n"
    )
    entry = (
        "  %x = bf16[8,512,1024]{2,1,0} parameter(2)\n  %y = bf16[8,1024,256]{2,1,0} parameter(3)\n"
        "  %f = bf16[8,512,256]{2,1,0} fusion(%x, %y), kind=kCustom, calls=%fused"
    )
    found = only(entry, others)
    assert found.kind == "matmul" and found.flops == 2 * 8 * 512 * 256 * 1024
    assert found.bytes == 2 * 8 * (512 * 1024 + 1024 * 256 + 512 * 256)
    assert found.seconds == matmul_seconds(GPU, 512, 256, 1024, "bfloat16", batch=8)


def test_a_fusion_moves_what_it_touches() -> None:
    """Of what is cut out it reads the part, and of what is updated in place it writes the part."""
    others = (
        "%fused (stack: f32[64,1024,256], new: f32[1,1024,256], i: s32[]) -> f32[64,1024,256] {\n"
        "  %stack = f32[64,1024,256]{2,1,0} parameter(0)\n  %new = f32[1,1024,256]{2,1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n  %zero = s32[] constant(0)\n"
        "  %old = f32[1,1024,256]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,1024,256}\n"
        "  %sum = f32[1,1024,256]{2,1,0} add(%old, %new)\n"
        "  ROOT %put = f32[64,1024,256]{2,1,0} dynamic-update-slice(%stack, %sum, %i, %zero, %zero)\n}\n"
    )
    entry = (
        "  %stack = f32[64,1024,256]{2,1,0} parameter(2)\n  %new = f32[1,1024,256]{2,1,0} parameter(3)\n"
        "  %i = s32[] parameter(4)\n  %f = f32[64,1024,256]{2,1,0} fusion(%stack, %new, %i), kind=kLoop, calls=%fused"
    )
    found = only(entry, others)
    assert found == Kernel("memory", memory_seconds(GPU, found.bytes), 0.0, 3 * 4 * 1024 * 256 + 4)


def test_attention() -> None:
    """cuDNN's call: shapes from its settings, half of the scores of a causal mask, 5 products backward."""
    settings = '"intermediate_tensor_shape":{"dimensions":["2","32","4096","4096"]},"mask_type":"CAUSAL"'
    call = (
        "  %f = (bf16[2,32,4096,128]{3,1,2,0}, u8[0]{0}) custom-call(%a, %a, %a), "
        'custom_call_target="__cudnn$fmhaSoftmaxBackward", operand_layout_constraints={bf16[2,4096,32,128]{3,2,1,0}, '
        f'bf16[2,4096,8,128]{{3,2,1,0}}}}, backend_config={{"cudnn_fmha_backend_config":{{{settings}}}}}'
    )
    found = only(call)
    assert found.kind == "attention" and found.flops == 5 * 2 * 2 * 32 * 4096 * 4096 * 128 / 2
    assert found.seconds == attention_seconds(GPU, 2, 32, 4096, 4096, 128, causal=True, dtype="bfloat16", backward=True)


def test_what_only_renames_costs_nothing() -> None:
    assert replayed("  %t = (bf16[4096,4096]{1,0}) tuple(%a)\n  %c = bf16[4096,4096]{1,0} bitcast(%b)").seconds == 0


def test_a_collective_is_hidden_as_far_as_there_is_work() -> None:
    """A gather with one product behind it is waited for, with several it is not; without any it is all waiting."""
    assert GATHER_SECONDS > PRODUCT_SECONDS
    alone, one = replayed(GATHER + GATHERED), replayed(GATHER + products("p") + GATHERED)
    assert alone.seconds == alone.parts["exposed fsdp"] == pytest.approx(GATHER_SECONDS)
    assert one.seconds == pytest.approx(GATHER_SECONDS) and one.parts["matmul"] == PRODUCT_SECONDS
    assert one.parts["exposed fsdp"] == pytest.approx(GATHER_SECONDS - PRODUCT_SECONDS)
    many = replayed(GATHER + products("p", "q", "r") + GATHERED)
    assert many.seconds == pytest.approx(3 * PRODUCT_SECONDS) and "exposed fsdp" not in many.parts
    assert many.communication["fsdp"] == pytest.approx(GATHER_SECONDS)
    assert [(span.lane, span.begin) for span in many.events[:2]] == [(LINKS, 0), (COMPUTE, 0)]


def test_two_lanes() -> None:
    """A reduction over the network and a gather over the links go side by side; two gathers one after the other."""
    reduction = f"  %reduce = f32[65536]{{0}} all-reduce-start(%b), to_apply=%add, {ACROSS}\n"
    reduced = "  %reduced = f32[65536]{0} all-reduce-done(%reduce)\n"
    seconds = collective_seconds(CLUSTER, "all-reduce", 4 * 65_536, Group(2, 1))
    both = replayed(reduction + GATHER + GATHERED + reduced)
    assert {span.lane for span in both.events} == {LINKS, NETWORK}
    assert both.seconds == pytest.approx(max(seconds, GATHER_SECONDS))
    again = GATHER.replace("%gather ", "%gather2 ") + GATHERED.replace("%gather", "%gather2").replace(
        "%gather2ed", "%gathered2"
    )
    assert replayed(GATHER + again + GATHERED).seconds == pytest.approx(2 * GATHER_SECONDS)


def test_loops() -> None:
    """Three iterations of a product and a gather that it hides are three times one; what the optimizer does has a kind
    of its own."""
    body = (
        "%body (p: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {\n"
        "  %p = (s32[], bf16[4096,4096]{1,0}) parameter(0)\n"
        "  %a = bf16[4096,4096]{1,0} get-tuple-element(%p), index=1\n"
        "  %b = bf16[4096,4096]{1,0} get-tuple-element(%p), index=1\n"
        f"{GATHER}{products('p1', 'p2', 'p3')}{GATHERED}"
        '  %add = bf16[4096,4096]{1,0} add(%a, %b), metadata={op_name="jit(step)/optimizer/add"}\n}\n'
    )
    times = 'backend_config={"known_trip_count":{"n":"3"}}'
    found = replayed(f"  %w = (s32[]) while(%a), condition=%c, body=%body, {times}", body)
    added = memory_seconds(GPU, 3 * 2 * 4096**2)
    assert found.seconds == pytest.approx(3 * (3 * PRODUCT_SECONDS + added))
    assert found.parts["optimizer"] == pytest.approx(3 * added) and found.kernels == 12
    assert found.flops == 9 * 2 * 4096**3
    assert sorted(span.begin for span in found.events if span.name == "p1") == pytest.approx(
        [turn * found.seconds / 3 for turn in range(3)]
    )
