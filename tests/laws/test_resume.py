"""The law *resume*: killed at any instant and started again, a run continues as if nothing had happened."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxscale.runtime.checkpoint import read_metadata
from tests.command import Workplace, finish, numbers, wait_for


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace in which the run "whole" went from start to end undisturbed."""
    place = Workplace(tmp_path_factory.mktemp("resume"))
    place.train("whole", "checkpoint.every_steps=2")
    return place


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint as Orbax reads them, without jaxscale."""
    import orbax.checkpoint as ocp

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    handler = ocp.PyTreeCheckpointHandler()
    metadata = handler.metadata(folder / "state").tree
    arguments = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=device), metadata)
    restored = handler.restore(folder / "state", args=ocp.args.PyTreeRestore(restore_args=arguments))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(restored)}


def assert_same_run(place: Workplace, name: str) -> None:
    """Every number of every update, and every array at the end, bit for bit those of "whole"."""
    assert [numbers(line) for line in place.metrics(name)] == [numbers(line) for line in place.metrics("whole")]
    mine = arrays(place.run_dir(name) / "checkpoints" / "16")
    theirs = arrays(place.run_dir("whole") / "checkpoints" / "16")
    assert mine.keys() == theirs.keys()
    for path in mine:
        np.testing.assert_array_equal(mine[path], theirs[path], err_msg=path)


def test_killed_at_many_moments(workplace: Workplace) -> None:
    """SIGKILL during the compile, between updates, and during saves; the run ends as if there had been none."""
    random = np.random.default_rng(0)
    process = workplace.start_training("killed", "checkpoint.every_steps=2")
    time.sleep(2)
    process.kill()
    process.communicate()
    for seen in (0, 1, 4, 7, 10, 12):
        process = workplace.start_training("killed", "checkpoint.every_steps=2")
        wait_for(lambda seen=seen: workplace.steps_done("killed") > seen, process)
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.communicate()
        if seen >= 4:
            assert workplace.checkpoints("killed"), f"no complete checkpoint after update {seen}"
    workplace.train("killed", "checkpoint.every_steps=2")
    assert_same_run(workplace, "killed")


def test_four_processes_to_two_to_one(workplace: Workplace) -> None:
    """A run goes on with other numbers of processes and other meshes: same batches, same losses to 2e-6."""
    workplace.train("moved", "train.steps=6", "cluster.simulate=1", processes=4)
    workplace.train("moved", "train.steps=11", "cluster.simulate=2", "mesh.tensor=2", processes=2)
    workplace.train("moved", "train.steps=16")
    for mine, whole in zip(workplace.metrics("moved"), workplace.metrics("whole"), strict=True):
        assert mine["batch_digest"] == whole["batch_digest"]
        assert (mine["examples"], mine["valid_tokens"]) == (whole["examples"], whole["valid_tokens"])
        for key in ("loss", "grad_norm"):
            np.testing.assert_allclose(mine[key], whole[key], rtol=2e-6 if mine["step"] == 1 else 2e-5)


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_stops_with_a_checkpoint(workplace: Workplace, name: signal.Signals) -> None:
    """Exit 75, a complete checkpoint of the last update in the metrics, and the same command goes on."""
    process = workplace.start_training(name.name)
    wait_for(lambda: workplace.steps_done(name.name) >= 2, process)
    process.send_signal(name)
    process.send_signal(name)  # a second one must not spoil the save
    output = finish(process, 75)
    assert "the same command goes on" in output
    step = workplace.steps_done(name.name)
    assert workplace.checkpoints(name.name) == [step]
    workplace.train(name.name)
    assert_same_run(workplace, name.name)


def test_signal_during_the_compile(workplace: Workplace) -> None:
    """A run that has done nothing yet leaves a checkpoint of its initial state."""
    process = workplace.start_training("early")
    wait_for(lambda: (workplace.run_dir("early") / "config.toml").exists(), process)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    assert workplace.checkpoints("early") == [workplace.steps_done("early")]
    workplace.train("early")
    assert_same_run(workplace, "early")


def test_signal_to_one_of_two_processes(workplace: Workplace) -> None:
    """Only process 1 gets it: both stop after the same update with one checkpoint, and the launcher exits 75."""
    import psutil

    overrides = (*workplace.always, "name=pair", "cluster.simulate=1", "train.steps=2000")
    config = str(Path(__file__).parents[2] / "configs" / "tiny" / "decoder.toml")
    process = workplace.start("launch", "local", "--processes", "2", config, *overrides)
    wait_for(lambda: workplace.steps_done("pair") >= 3, process)
    ranks = {int(child.environ()["JAXSCALE_PROCESS_ID"]): child for child in psutil.Process(process.pid).children()}
    ranks[1].send_signal(signal.SIGTERM)
    finish(process, 75)
    assert workplace.checkpoints("pair") == [workplace.steps_done("pair")]


def test_finished_run_is_left_alone(workplace: Workplace) -> None:
    """The same command again exits 0 and changes nothing; fewer updates are refused; more go on."""
    folder = workplace.run_dir("whole")

    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = contents()
    assert "is finished" in workplace.train("whole", "checkpoint.every_steps=2")
    assert contents() == before
    assert "train.steps=16" in workplace.train("whole", "train.steps=12", code=2)
    assert contents() == before


def test_second_run_in_a_directory_is_refused(workplace: Workplace) -> None:
    """While a run is under way, the same command is refused and does not disturb it."""
    process = workplace.start_training("busy", "train.steps=3000")
    wait_for(lambda: workplace.steps_done("busy") >= 1, process)
    assert "is in use by another run" in workplace.train("busy", "train.steps=3000", code=2)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    assert workplace.checkpoints("busy") == [workplace.steps_done("busy")]


def test_changes_on_resume(workplace: Workplace) -> None:
    """Batch, length, seed, data and architecture are refused with old and new value; the rest takes full effect."""
    workplace.train("changed", "train.steps=4")
    folder = workplace.run_dir("changed")
    config = (folder / "config.toml").read_text()
    for override, said in {
        "batch.global_size=16": "batch.global_size = 16, was 8",
        "data.sequence_length=64": "data.sequence_length = 64, was 32",
        "seed=5": "seed = 5, was 0",
        "data.shuffle=false": "data.shuffle = False, was True",
        "data.train=datasets/tiny/validation": "fingerprint",
        "model.mlp_dim=96": "layers/mlp/up/kernel: saved float32[1, 32, 64], this run has float32[1, 32, 96]",
    }.items():
        assert said in workplace.train("changed", "train.steps=8", override, "data.build=none", code=2)
        assert (folder / "config.toml").read_text() == config
    output = workplace.train("changed", "train.steps=8", "optimizer.learning_rate=5e-4")
    assert "optimizer.learning_rate: 0.001 -> 0.0005" in output
    rates = [line["learning_rate"] for line in workplace.metrics("changed")]
    np.testing.assert_allclose(rates, [5e-4, *3 * [1e-3], *4 * [5e-4]], rtol=1e-6)
    assert read_metadata(folder / "checkpoints", 8)["config"]["optimizer.learning_rate"] == 5e-4
    workplace.train("changed", "train.steps=9", "seed=5", "data.accept_change=true")


def test_evaluation_does_not_change_training(workplace: Workplace) -> None:
    """Evaluating at every update gives the same run, and an evaluation repeated gives the same number."""
    workplace.train("evaluated", "evaluate.every_steps=1", "checkpoint.every_steps=5")
    assert_same_run(workplace, "evaluated")
    first, second = (
        json.loads(finish(workplace.start("eval", "runs/evaluated", "--json", *more), 0))
        for more in ((), ("evaluate.batch_size=3",))
    )
    lines = map(json.loads, (workplace.run_dir("evaluated") / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if "split" in line][-1]
    assert first["validation"]["loss"] == last["loss"]
    np.testing.assert_allclose(second["validation"]["loss"], last["loss"], rtol=1e-6)
    assert second["validation"]["valid_tokens"] == last["valid_tokens"]
