"""Processes that gather: a dead one is a clear error within seconds, and none is left behind."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest

from jaxscale.train.hooks import WAIT_WARM_UP, WAIT_WINDOW, DataWaitHook
from jaxscale.train.loop import Update
from tests.command import CONFIG, Workplace, finish, wait_for


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("workers"))
    finish(place.start("data", "build", str(CONFIG)), 0)
    return place


def start(place: Workplace, name: str) -> subprocess.Popen[str]:
    """A long run with two workers, under way."""
    process = place.start_training(name, "train.steps=100000", "data.workers=2", "data.build=none")
    wait_for(lambda: place.steps_done(name) >= 3, process)
    return process


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that gather for a run: children that run Python code of their own."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if any("spawn_main" in argument for argument in child.cmdline())]


def assert_gone(processes: list[psutil.Process], seconds: float = 15) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive


def test_a_run_with_workers_is_the_same_run(place: Workplace) -> None:
    place.train("alone")
    place.train("helped", "data.workers=2", "data.read_threads=2")
    digests = [[line["batch_digest"] for line in place.metrics(name)] for name in ("alone", "helped")]
    assert digests[0] == digests[1]


def test_a_dead_worker_ends_the_run_with_a_message(place: Workplace) -> None:
    process = start(place, "dead")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(workers(process)) == 2, [child.cmdline() for child in children]
    begin = time.monotonic()
    workers(process)[0].kill()
    output = finish(process, 1)
    assert time.monotonic() - begin < 20
    assert "jaxscale: data.workers: a process that gathers batches has died" in output and "Traceback" not in output
    assert_gone(children)


@pytest.mark.parametrize("name", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_is_left_behind(place: Workplace, name: signal.Signals) -> None:
    process = start(place, name.name)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(name)
    process.communicate(timeout=60)
    assert process.returncode == (75 if name == signal.SIGTERM else -9)
    assert_gone(children)


def test_waiting_for_data_is_told_once() -> None:
    """More than a hundredth of the time over a hundred updates; the first few, which fill the buffers, do not count."""
    said: list[str] = []
    hook = DataWaitHook(said.append, "advice")

    def updates(count: int, waited: float) -> None:
        for _ in range(count):
            hook.read(Update(0, {}, None, step_seconds=0.1, data_wait_seconds=waited))  # type: ignore[arg-type]

    updates(WAIT_WARM_UP, 0.1)
    updates(WAIT_WINDOW, 0.0009)
    assert not said
    updates(2 * WAIT_WINDOW, 0.002)
    assert said == [f"waiting for data: 2.0% of the last {WAIT_WINDOW} updates up to 0; advice"]
