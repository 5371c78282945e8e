"""Reading collectives off compiled programs: by hand, and off real programs whose collectives are known."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.config.load import load
from jaxscale.plan.collectives import Collective, collectives
from jaxscale.plan.groups import participants
from jaxscale.plan.program import read_program
from tests import tiny

AXES = {"replica": 2, "fsdp": 2, "tensor": 2}

# A loop of 4 around a loop of 3, one whose length nobody knows, an asynchronous computation, a call and a conditional.
NESTED = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%inner (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %reduced = f32[8,16]{1,0} all-reduce(%p.1), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %tuple.1 = (s32[], f32[8,16]{1,0}) tuple(%i, %reduced)
}

%asks (p: (s32[], f32[8,16])) -> pred[] {
  %any = pred[] all-reduce(%p.2), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %compare = pred[] compare(%any, %no), direction=LT
}

%outer (q: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %while.1 = (s32[], f32[8,16]{1,0}) while(%q), condition=%asks, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %start = (bf16[4,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%r), replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
  %all-gather-done = bf16[8,16]{1,0} all-gather-done(%start), metadata={op_name="jit(f)/all-gather-start(x)"}
  ROOT %tuple.2 = (s32[], f32[8,16]{1,0}) tuple(%j, %while.1)
}

%wrapped (s: f32[8,16]) -> f32[4,16] {
  ROOT %scattered = f32[4,16]{1,0} reduce-scatter(%s), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}, to_apply=%add
}, execution_thread="parallel"

%body (t: (s32[])) -> (s32[]) {
  ROOT %moved = f32[2]{0} collective-permute(%t), source_target_pairs={{0,4},{4,0}}
}

%yes (u: f32[6]) -> f32[6] {
  ROOT %swapped = (f32[3]{0}, f32[3]{0}) all-to-all(%a, %b), channel_id=5, replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%no (u: f32[6]) -> f32[6] {
  ROOT %u.1 = f32[6]{0} negate(%u)
}

ENTRY %main (arg: f32[8,16]) -> f32[8,16] {
  %while.2 = (s32[], /*index=1*/f32[8,16]{1,0}) while(%arg), condition=%no, body=%outer, backend_config={"known_trip_count":{"n":"4"}}
  %while.3 = (s32[]) while(%arg), condition=%no, body=%body
  %async = ((f32[8,16]), f32[4,16], u32[]) async-start(%while.2), calls=%wrapped
  %async-done = f32[4,16]{1,0} async-done(%async), calls=%wrapped
  %called = f32[6]{0} call(%arg), to_apply=%yes
  ROOT %chosen = f32[6]{0} conditional(%p, %a, %b), branch_computations={%yes, %no}
}
"""  # noqa: E501


def mesh(order: list[int] | None = None) -> Mesh:
    """Eight simulated devices as replica 2 x fsdp 2 x tensor 2."""
    devices = np.array(jax.devices())[order or list(range(8))]
    return Mesh(devices.reshape(tuple(AXES.values())), tuple(AXES))


def test_counts_follow_loops_and_calls() -> None:
    """Every collective counts as often as it runs; asynchronous pairs once; conditions once more than their body."""
    found = set(collectives(read_program(NESTED), mesh().shape))
    assert found == {
        Collective("all-reduce", ("tensor",), 2, "f32", 4 * 3, 4 * 3 * 8 * 16 * 4),
        Collective("all-reduce", ("replica", "fsdp", "tensor"), 8, "pred", 4 * (3 + 1), 4 * (3 + 1)),
        # [4,2]<=[4,2]T(1,0) is 0,2 4,6 1,3 5,7: neighbours in fsdp.
        Collective("all-gather", ("fsdp",), 2, "bf16", 4, 4 * 8 * 16 * 2),
        # [2,2,2]T(0,2,1) is 0,2 1,3 4,6 5,7; the payload is the operand.
        Collective("reduce-scatter", ("fsdp",), 2, "f32", 1, 8 * 16 * 4),
        Collective("collective-permute", ("replica",), 2, "f32", 1, 2 * 4, at_least=True),
        Collective("all-to-all", ("tensor",), 2, "f32", 2, 2 * 6 * 4),
    }


@pytest.mark.parametrize(
    ("instruction", "dtype", "payload", "sent"),
    [
        ("f32[8]{0} all-reduce(%a)", "f32", 32, 2 * 32 * 3 / 4),
        ("f32[8]{0} all-reduce-start(%a)", "f32", 32, 48),
        ("(f32[8]{0}, /*index=1*/f32[]) all-reduce-start(%a, %b)", "f32", 36, 54),
        ("((f32[8]{0}), f32[8]{0}, u32[]) all-reduce-start(%a)", "f32", 32, 48),
        ("f32[8,128]{1,0:T(8,128)} all-gather(%a)", "f32", 4096, 3072),
        ("(bf16[2]{0}, bf16[8]{0}) all-gather-start(%a)", "bf16", 16, 12),
        ("((bf16[2], f32[1]), (bf16[8], f32[4])) all-gather-start(%a, %b)", "bf16+f32", 32, 24),
        ("f32[2]{0} reduce-scatter(%a)", "f32", 32, 24),
        ("((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%a)", "f32", 32, 24),
        ("f8e4m3fn[4,2]{1,0} all-to-all(%a)", "f8e4m3fn", 8, 6),
        ("(s4[2]{0}, s4[2]{0}, s4[2]{0}, s4[2]{0}) all-to-all(%a, %b, %c, %d)", "s4", 4, 3),
        ("f32[<=16]{0} ragged-all-to-all(%a, %b, %c, %d, %e, %f)", "f32", 64, 48),
        ("pred[] all-reduce(%a)", "pred", 1, 2),
    ],
)
def test_bytes(instruction: str, dtype: str, payload: int, sent: int) -> None:
    """Payload and sent bytes of groups of four, by hand, for every way of writing a result."""
    program = (
        f"ENTRY %main (a: f32[]) -> f32[] {{\n  ROOT %c = {instruction}, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}\n}}"
    )
    (found,) = collectives(read_program(program), mesh().shape)
    assert (found.axes, found.group_size, found.count) == (("fsdp", "tensor"), 4, 1)
    assert (found.dtype, found.payload_bytes, found.sent_bytes) == (dtype, payload, sent)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor", 2),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", "fsdp", 2),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "replica", 2),
        ("replica_groups={{0,5,2,7},{4,1,6,3}}", "replica fsdp tensor", 4),
        ("replica_groups={{0,1,2},{3},{4},{5},{6},{7}}", "fsdp tensor", 3),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", "", 1),
        ("replica_groups={}", "replica fsdp tensor", 8),
        ("dimensions={0}", "replica fsdp tensor", 8),
        ("replica_groups=[4,2]<=[8]", "tensor", 2),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", "fsdp", 2),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", "replica tensor", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", "replica", 2),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_1'}", "replica fsdp", 4),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([2,2,2]T(1,0,2)) {'b'}", "fsdp", 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,1,4,5,2,3,6,7) {'b'}", "replica tensor", 4),
        ("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'x','z'}", "replica tensor", 4),
        ("replica_groups=mesh['x'=8] {'x'}", "replica fsdp tensor", 8),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", "fsdp", 2),
        ("replica_groups=mesh['x'=8] {'x':(1)2,'x':(4)2}", "replica tensor", 4),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", "tensor", 2),
        ("source_target_pairs={{0,3},{3,0}}", "fsdp tensor", 4),
        ("source_target_pairs={}", "", 1),
    ],
)
def test_groups_in_all_their_forms(groups: str, axes: str, size: int) -> None:
    """Devices 0 to 7 stand at replica x fsdp x tensor, the last varying fastest."""
    line = f"  %c = f32[8]{{0}} all-reduce(%a), channel_id=1, {groups}, use_global_device_ids=true, metadata={{}}"
    assert participants(line, AXES) == (tuple(axes.split()), size)


@pytest.mark.parametrize("order", [None, [3, 1, 0, 2, 7, 6, 5, 4]], ids=["in order", "permuted"])
def test_a_real_program(order: list[int] | None) -> None:
    """A loop of 5 and one of each kind, compiled: exactly what is written, in whatever order the devices stand."""
    on = mesh(order)
    spec = PartitionSpec("replica", "fsdp")

    def body(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x * jax.lax.psum(x, "fsdp"), None

        x, _ = jax.lax.scan(step, x, None, length=5)
        x = x * jax.lax.psum(x[0, 0], ("replica", "tensor"))
        x = jax.lax.all_gather(x, "fsdp", axis=1, tiled=True)
        x = jax.lax.psum_scatter(x * x, "fsdp", scatter_dimension=1, tiled=True)
        x = jax.lax.all_to_all(x, "replica", 0, 1, tiled=True)
        return jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]).reshape(8, 32)

    program = jax.jit(jax.shard_map(body, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = program.lower(jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(on, spec))).compile()
    local = 8 * 32 * 4  # bytes of f32[16,64] on one device
    assert set(collectives(read_program(compiled.as_text()), on.shape)) == {
        Collective("all-reduce", ("fsdp",), 2, "f32", 5, 5 * local),
        Collective("all-reduce", ("replica", "tensor"), 4, "f32", 1, 4),
        Collective("all-gather", ("fsdp",), 2, "f32", 1, 2 * local),
        Collective("reduce-scatter", ("fsdp",), 2, "f32", 1, 2 * local),
        Collective("all-to-all", ("replica",), 2, "f32", 1, local),
        Collective("collective-permute", ("tensor",), 2, "f32", 1, local),
    }


def test_gathers_of_a_training_step() -> None:
    """A microstep gathers each layer's parameters forward and its matrices again backward; the rest once an update."""
    config = load(tiny.repository() / "configs/tiny/decoder.toml", ["mesh.fsdp=4", "batch.microbatch=2"])
    run = tiny.make_run(config, 4)
    assert run.batch(0)["tokens"].shape[0] == 2
    text = run.lower_train_step(run.batch(0)).compile().as_text()
    gathers = [one for one in collectives(read_program(text), run.mesh.shape) if one.kind == "all-gather"]
    matrices = 128 * 128 * 2 + 128 * 64 * 2 + 128 * 384 * 3  # queries and output, keys and values, MLP
    norms = 2 * 128
    once = 2 * 512 * 128 + 128  # embedding, head, final norm
    assert [(one.axes, one.group_size, one.dtype, one.at_least) for one in gathers] == [(("fsdp",), 4, "f32", False)]
    assert gathers[0].payload_bytes == 4 * (2 * config.model.layers * (matrices + norms + matrices) + once)
    assert gathers[0].count == 2 * config.model.layers * (7 + 2 + 7) + 3
    assert len(re.findall(r" all-gather\(", text)) == 7 + 2 + 7 + 3
