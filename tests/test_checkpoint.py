"""Checkpoints: complete or absent, on any mesh and number of processes, kept by rule, loud when they fail."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxscale.config.errors import Refused
from jaxscale.runtime.checkpoint import complete_steps, read_metadata
from tests.processes import run_together, start

# A state with sharded, copied, bfloat16, integer and scalar leaves in the containers that optax and Flax use.
COMMON = """
import collections, os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxscale.cluster import distributed
from jaxscale.config.errors import Fault, Refused
from jaxscale.config.schema import ClusterConfig
from jaxscale.runtime.checkpoint import Checkpoints

Moments = collections.namedtuple("Moments", "mean square")
folder = Path(sys.argv[1])

def begin(devices):
    return distributed.start(ClusterConfig(simulate=devices, compilation_cache=None))

def make_state(mesh, spec, seed=0, rows=16):
    def array(shape, dtype, spec):
        values = (np.arange(np.prod(shape)).reshape(shape) % 251 + seed).astype(dtype)
        return jax.make_array_from_callback(shape, jax.NamedSharding(mesh, spec), lambda index: values[index])
    return {
        "parameters": {"matrix": array((rows, 24), jnp.float32, spec), "scale": array((5,), jnp.bfloat16, jax.P())},
        "optimizer": (Moments(array((rows, 24), jnp.float32, spec), None), {}),
        "cursor": array((2,), jnp.uint32, jax.P()),
        "count": array((), jnp.int32, jax.P()),
    }

def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

def check_equal(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(expected)):
        assert got.dtype == wanted.dtype and got.sharding == wanted.sharding, (got.sharding, wanted.sharding)
        for mine, yours in zip(got.addressable_shards, wanted.addressable_shards):
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(yours.data))
"""

SAVE = (
    COMMON
    + """
begin(int(sys.argv[2]))
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
checkpoints = Checkpoints(folder, keep=2)
checkpoints.prepare()
checkpoints.save(7, make_state(mesh, jax.P("fsdp"), seed=3), {"learning_rate": 0.1, "name": "x"})
checkpoints.close()
distributed.shutdown()
"""
)

RESTORE = (
    COMMON
    + """
begin(int(sys.argv[2]))
mesh = jax.make_mesh(eval(sys.argv[3]), ("a", "b"))
expected = make_state(mesh, eval(sys.argv[4]), seed=3)
checkpoints = Checkpoints(folder, keep=2)
assert checkpoints.latest() == 7
with jax.set_mesh(mesh):
    check_equal(checkpoints.restore(7, abstract(expected)), expected)
assert checkpoints.restore_metadata(7) == {"learning_rate": 0.1, "name": "x"}
checkpoints.close()
distributed.shutdown()
"""
)


def run(script: str, *arguments: str) -> str:
    """Run a script in one process and return its output; it must exit with 0."""
    return run_together(1, script, *arguments)[0]


def test_restored_on_other_meshes(tmp_path: Path) -> None:
    run(SAVE, str(tmp_path), "8")
    run(RESTORE, str(tmp_path), "8", "(2, 4)", "jax.P('a', 'b')")
    run(RESTORE, str(tmp_path), "4", "(1, 4)", "jax.P(None, 'b')")
    run(RESTORE, str(tmp_path), "1", "(1, 1)", "jax.P()")


def test_restored_by_another_number_of_processes(tmp_path: Path) -> None:
    run_together(2, SAVE, str(tmp_path / "two"), "2")
    run(RESTORE, str(tmp_path / "two"), "2", "(2, 1)", "jax.P('a')")
    run(SAVE, str(tmp_path / "one"), "2")
    run_together(2, RESTORE, str(tmp_path / "one"), "1", "(1, 2)", "jax.P('b')")


def test_readable_without_devices(tmp_path: Path) -> None:
    run(SAVE, str(tmp_path), "2")
    assert complete_steps(tmp_path) == [7]
    assert read_metadata(tmp_path, 7) == {"learning_rate": 0.1, "name": "x"}


def test_a_damaged_checkpoint_names_the_one_before(tmp_path: Path) -> None:
    run(SAVE, str(tmp_path), "1")
    shutil.copytree(tmp_path / "7", tmp_path / "5")
    (tmp_path / "7" / "metadata" / "metadata").write_text("{")
    with pytest.raises(Refused, match=r"7: damaged checkpoint \(.*\); to go on from step 5, remove that folder"):
        read_metadata(tmp_path, 7)
    assert read_metadata(tmp_path, 5) == {"learning_rate": 0.1, "name": "x"}


def test_donating_the_state_does_not_disturb_a_save(tmp_path: Path) -> None:
    run(
        COMMON
        + """
begin(2)
mesh = jax.make_mesh((2,), ("fsdp",))
checkpoints = Checkpoints(folder, keep=9)
checkpoints.prepare()
state = make_state(mesh, jax.P("fsdp"), seed=1, rows=65536)
update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), state), donate_argnums=0)
for step in range(1, 5):
    checkpoints.save(step, state, {})
    state = update(state)
checkpoints.wait()
for step in range(1, 5):
    expected = make_state(mesh, jax.P("fsdp"), seed=step, rows=65536)["parameters"]["matrix"]
    restored = checkpoints.restore(step, abstract(state))["parameters"]["matrix"]
    np.testing.assert_array_equal(np.asarray(restored), np.asarray(expected))
checkpoints.close()
""",
        str(tmp_path),
    )


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    run(SAVE, str(tmp_path), "1")
    output = run(
        COMMON
        + """
begin(1)
mesh = jax.make_mesh((1,), ("fsdp",))
wanted = make_state(mesh, jax.P(), rows=32)
wanted["parameters"]["bias"] = wanted["parameters"].pop("scale")
try:
    Checkpoints(folder, keep=1).restore(7, abstract(wanted))
except Refused as refused:
    print(refused)
try:
    Checkpoints(folder, keep=1).restore(8, abstract(wanted))
except Refused as refused:
    print(refused)
""",
        str(tmp_path),
    )
    assert "parameters/matrix: saved float32[16, 24], this run has float32[32, 24]" in output
    assert "parameters/scale: saved bfloat16[5], this run has nothing" in output
    assert "parameters/bias: saved nothing, this run has bfloat16[5]" in output
    assert "cursor" not in output
    assert "no complete checkpoint of step 8; complete: 7" in output


RETENTION = (
    COMMON
    + """
begin(1)
state = make_state(jax.make_mesh((jax.device_count(),), ("fsdp",)), jax.P("fsdp"))
def saved(keep, saves, confirmed):
    checkpoints = Checkpoints(folder, keep)
    checkpoints.prepare()
    for step in saves:
        checkpoints.save(step, state, {})
        if step in confirmed:
            checkpoints.confirm(step)
    checkpoints.close()
    return checkpoints.steps()
def check(steps, expected):  # process 0 deletes, so the others may still see what is being deleted
    assert jax.process_index() or steps == expected, steps
"""
)


@pytest.mark.parametrize("processes", [1, 2])
def test_retention(tmp_path: Path, processes: int) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep me")
    (tmp_path / "12").mkdir()  # a number, but no checkpoint
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()  # left over by a kill
    run_together(
        processes,
        RETENTION
        + """
check(saved(2, [1, 2, 3], [1, 2, 3]), [2, 3])
check(saved(2, [4, 5, 6], []), [2, 3, 4, 5, 6])  # not confirmed, so nothing older may go
check(saved(2, [7], [7]), [3, 4, 5, 6, 7])
check(saved(2, [8], [8]), [7, 8])
check(saved(1, [9], [9]), [9])  # a lower number after a restart
check(saved(3, [9, 10], [9, 10]), [9, 10])  # saving a complete step again changes nothing
distributed.shutdown()
""",
        str(tmp_path),
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["10", "12", "9", "confirmed.json", "notes"]
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep me"


KILLED = (
    COMMON
    + """
begin(2)
mesh = jax.make_mesh((2,), ("fsdp",))
checkpoints = Checkpoints(folder, keep=2)
checkpoints.prepare()
last = checkpoints.latest() or 0
if last:
    check_equal(checkpoints.restore(last, abstract(make_state(mesh, jax.P("fsdp"), last, 4096))),
                make_state(mesh, jax.P("fsdp"), last, 4096))
print("from", last, flush=True)
for step in range(last + 1, last + 1000):
    checkpoints.save(step, make_state(mesh, jax.P("fsdp"), step, 4096), {"step": step})
    checkpoints.confirm(step)
"""
)


def test_killed_at_any_instant(tmp_path: Path) -> None:
    """Whatever is chosen after a kill is complete, and once there was a checkpoint there always is one."""
    moments = random.Random(1)
    newest = 0
    for attempt in range(7):
        child = start(KILLED, str(tmp_path))
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("from"), line + child.stdout.read()
        assert int(line.split()[1]) == newest
        wait_for = newest + attempt % 3
        end = time.monotonic() + moments.uniform(0.0, 0.2)
        while time.monotonic() < end or newest < wait_for:
            there = complete_steps(tmp_path)
            assert there or not newest
            newest = max(there, default=0)
            assert child.poll() is None
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        newest = max(complete_steps(tmp_path), default=0)
    assert newest > 5


def test_unwritable_folder_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = run(
        COMMON
        + """
begin(1)
try:
    Checkpoints(folder / "file" / "checkpoints", keep=1).prepare()
except Refused as fault:
    print(fault)
""",
        str(tmp_path),
    )
    assert f"checkpoints cannot be written to {tmp_path}/file/checkpoints: Not a directory" in output


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_is_a_fault_and_leaves_the_last_checkpoint(small_disk: Path) -> None:
    output = run(
        COMMON
        + """
begin(1)
mesh = jax.make_mesh((1,), ("fsdp",))
checkpoints = Checkpoints(folder, keep=5)
checkpoints.prepare()
checkpoints.save(1, make_state(mesh, jax.P(), 1), {})
noise = jax.random.normal(jax.random.key(0), (2_000_000,))
checkpoints.save(2, {"noise": noise}, {})
try:
    while True:
        checkpoints.check()
        time.sleep(0.05)
except Fault as fault:
    print(fault)
checkpoints.wait()
print(checkpoints.steps())
check_equal(checkpoints.restore(1, abstract(make_state(mesh, jax.P(), 1))), make_state(mesh, jax.P(), 1))
""",
        str(small_disk),
    )
    assert "the checkpoint of step 2 could not be saved" in output
    assert "[1]" in output


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for folder in ("runs/x", "./y/", "~/z", "link"):
        run(SAVE, folder, "1")
    for folder in ("runs/x", "y", "z", "real"):
        assert complete_steps(tmp_path / folder) == [7]
