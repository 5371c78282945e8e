"""The law *flow*: the loop never waits for the device except where a person asked for a number; one compile a step."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.data.feed import FedBatch
from jaxscale.train import loop
from jaxscale.train.build import batch_shape, compile_steps, shardings
from jaxscale.train.hooks import BaseHook
from jaxscale.train.loop import run_loop
from tests import tiny
from tests.command import CONFIG, Workplace
from tests.processes import environment


class Recorder(BaseHook):
    """Writes down what the loop does, in order; asks for the state at some steps."""

    def __init__(self, events: list[str], asks: tuple[int, ...] = ()) -> None:
        self.events, self.asks = events, asks

    def due(self, step: int) -> bool:
        return step in self.asks

    def read(self, update: loop.Update) -> None:
        self.events.append(f"read {update.step}")

    def at(self, step: int, state: Any) -> None:
        self.events.append(f"at {step}")


class Events:
    """A feed and a training step that only say when they are called."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.step = 0

    def next(self) -> tuple[FedBatch, float]:
        return FedBatch({}, np.arange(0), None), 0.0

    def train_step(self, state: int, batch: Any) -> tuple[int, dict[str, np.ndarray]]:
        self.step += 1
        self.events.append(f"dispatch {self.step}")
        return state + 1, {"loss": np.float32(self.step)}

    def run(self, asks: tuple[int, ...], stop_after: int = 99) -> list[str]:
        """The events of a loop over five updates."""
        hook = Recorder(self.events, asks)
        run_loop(
            0, self.train_step, self, 0, 5, [hook], lambda: self.step >= stop_after, lambda _: contextlib.nullcontext()
        )  # type: ignore[arg-type]
        return self.events


def test_update_is_dispatched_before_the_one_before_is_read() -> None:
    """Metrics are read one update late, all of them, and none twice."""
    assert Events().run(()) == [
        "dispatch 1",
        "dispatch 2",
        "read 1",
        "dispatch 3",
        "read 2",
        "dispatch 4",
        "read 3",
        "dispatch 5",
        "read 4",
        "read 5",
    ]


def test_where_a_person_asked_metrics_come_first() -> None:
    """A hook that wants the state finds the metrics of its update read: a checkpoint is known to be sound."""
    events = Events().run((2, 5))
    assert events[:6] == ["dispatch 1", "dispatch 2", "read 1", "read 2", "at 2", "dispatch 3"]
    assert events[-2:] == ["read 5", "at 5"]


def test_stop_leaves_nothing_unread() -> None:
    """A loop that is stopped has read what it dispatched."""
    assert Events().run((), stop_after=3)[-2:] == ["read 2", "read 3"]


def test_one_host_read_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop fetches from the devices once an update, in one call, and nothing else does."""
    run = tiny.make_run(tiny.config(mesh={"fsdp": 2}))
    fetched = []
    device_get = jax.device_get
    monkeypatch.setattr(loop.jax, "device_get", lambda tree: fetched.append(1) or device_get(tree))

    class Feed:
        step = 0

        def next(self) -> tuple[FedBatch, float]:
            self.step += 1
            return FedBatch(tiny.device_batch(run, tiny.host_batch(run, self.step)), np.arange(8), None), 0.0

    compiled, initialize = run.lower_train_step(run.batch(0)).compile(), run.lower_initialize().compile()
    none = contextlib.nullcontext
    state, step = run_loop(initialize(), compiled, Feed(), 0, 4, [], lambda: False, lambda _: none())  # type: ignore[arg-type]
    assert step == 4
    assert len(fetched) == 4
    assert int(state.step[1]) == 4


def test_step_pins_every_leaf_and_donates_the_state() -> None:
    """What goes out of the step lies as what went in, leaf by leaf, so no second compile can come; and in its place."""
    run = tiny.make_run(tiny.config(mesh={"replica": 2, "fsdp": 2, "tensor": 2}))
    compiled = run.lower_train_step(run.batch(0)).compile()
    ins, outs = compiled.input_shardings[0][0], compiled.output_shardings[0]
    for before, after, wanted, leaf in zip(
        *map(jax.tree.leaves, (ins, outs, shardings(run.state), run.state)), strict=True
    ):
        assert before.is_equivalent_to(wanted, leaf.ndim)
        assert after.is_equivalent_to(wanted, leaf.ndim)
    local = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.state)
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= local


def test_each_step_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Through evaluations, checkpoints, ends of epochs and a resume, a process compiles each step exactly once."""
    place = Workplace(tmp_path_factory.mktemp("flow"))
    often = ("evaluate.every_steps=2", "checkpoint.every_steps=3", "evaluate.batch_size=3")
    for steps, initialized in (("train.steps=7", 1), ("train.steps=10", 0)):
        arguments = ["train", str(CONFIG), *place.always, "name=flow", *often, steps, "cluster.compilation_cache=none"]
        done = subprocess.run(
            [sys.executable, "-m", "jaxscale", *arguments],
            cwd=place.folder,
            env=environment(JAX_LOG_COMPILES="1"),
            capture_output=True,
            text=True,
            check=True,
        )
        compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.stderr)
        assert compiled.count("train_step") == 1
        assert compiled.count("evaluation_step") == 1
        assert compiled.count("initialize") == initialized


def test_one_compile_for_each_shape_of_the_phases() -> None:
    """Four phases of three shapes: three programs, all before the first update, none for what is behind a resume."""
    phases = ({"start": 2, "global_size": 16}, {"start": 4, "global_size": 8}, {"start": 5, "sequence_length": 32})
    run = tiny.make_run(tiny.config(batch={"microbatch": 8}, phases=phases))
    shapes = [tuple(run.batch(step)["tokens"].shape) for step in range(8)]
    first, second, third, last = (1, 8, 64), (2, 8, 64), (1, 8, 64), (1, 8, 32)
    assert shapes == [first] * 2 + [second] * 2 + [third] + [last] * 3
    assert set(run.batches) == {first, second, last}
    for done, wanted in ((0, {first, second, last}), (3, {first, second, last}), (4, {third, last}), (6, {last})):
        assert {batch_shape(phase, run.mesh.shape) for phase in run.timeline.after(done)} == wanted
    steps = compile_steps(run, evaluates=False, initializes=True, first=4)
    assert set(steps.by_shape) == {third, last}
    state = steps.initialize()
    for step in (4, 5):
        batch = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in run.batch(step).items()}
        state, _ = steps.train(state, batch)
        assert int(state.cursor[1]) == 8 * (step - 3)
