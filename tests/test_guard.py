"""Signals stop all processes after the same step; a process that hangs is ended."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from jaxscale.runtime.guard import STOP_SIGNALS, StopSignal
from tests.processes import run_together, start

# A loop like that of training: at most two steps in flight, each of them a sum over all processes. Each process is slow
# at steps of its own choice. The processes `who` send themselves the signal at step `when`. (Steps run in a thread,
# since CPU devices may run them while they are dispatched, which GPUs do not.)
LOOP = """
import os, random, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp
from jaxscale.cluster import distributed
from jaxscale.config.schema import ClusterConfig
from jaxscale.runtime.guard import StopSignal

processes = distributed.start(ClusterConfig(simulate=1, compilation_cache=None))
mesh = jax.make_mesh((processes.devices,), ("data",))
sharding = jax.NamedSharding(mesh, jax.P("data"))
ones = jax.make_array_from_process_local_data(sharding, jnp.ones((1,)))
step_function = jax.jit(lambda x: jnp.sum(x), out_shardings=jax.NamedSharding(mesh, jax.P()))
device = ThreadPoolExecutor(1)
slow = random.Random(processes.index)

for trial in range(12):
    who = {0: (0,), 1: (1,), 2: (0, 1)}[trial % 3]
    when, last = 3 + trial, 20
    with StopSignal() as stop:
        in_flight, done = [], 0
        for step in range(1, last + 1):
            if processes.index in who and step == when + (processes.index if trial % 2 else 0):
                os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1)[trial % 2])
            if slow.random() < 0.3:
                time.sleep(0.01)
            if stop.agreed():
                break
            in_flight.append(device.submit(lambda: step_function(ones).block_until_ready()))
            if len(in_flight) == 2:
                in_flight.pop(0).result()
            done = step
        assert stop.agreed() or done == last
    assert done <= when + 3
    print("trial", trial, "stopped after", done)
distributed.shutdown()
"""


def test_all_processes_stop_after_the_same_step() -> None:
    first, second = (
        [line for line in output.splitlines() if line.startswith("trial")] for output in run_together(2, LOOP)
    )
    assert first == second
    assert len(first) == 12


def test_one_process_stops_at_once() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        before = signal.getsignal(number)
        with StopSignal() as stop:
            assert not stop.agreed()
            signal.raise_signal(number)
            signal.raise_signal(number)  # a second one must not kill the save
            assert stop.agreed()
            assert stop.agreed()
            assert stop.signal == number
        assert signal.getsignal(number) is before


def test_handlers_are_put_back_after_an_error() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), StopSignal():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def wait_for_line(child: subprocess.Popen[str], text: str) -> None:
    """Read the output of a process up to a line with `text`."""
    assert child.stdout is not None
    for line in child.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never printed")


def test_second_interrupt_ends_at_once() -> None:
    child = start(
        "import time\nfrom jaxscale.runtime.guard import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    print('ready')\n"
        "    while not stop.agreed(): time.sleep(0.01)\n"
        "    print('saving')\n"
        "    time.sleep(60)\n"
    )
    wait_for_line(child, "ready")
    child.send_signal(signal.SIGINT)
    wait_for_line(child, "saving")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=10)
    assert child.returncode == -signal.SIGINT


WATCHED = """
import time
from jaxscale.runtime.guard import Watchdog
watchdog = Watchdog(0.8)
for _ in range(20):
    watchdog.alive()
    time.sleep(0.1)
print("alive so far", flush=True)
def stuck_in_a_collective():
    time.sleep(60)
{end}
"""


def test_watchdog() -> None:
    began = time.monotonic()
    child = start(WATCHED.format(end="stuck_in_a_collective()"))
    output, _ = child.communicate(timeout=30)
    assert child.returncode == 1
    assert "alive so far" in output
    assert "stuck_in_a_collective" in output  # the stack says where
    assert time.monotonic() - began < 25
    child = start(WATCHED.format(end="watchdog.close(); time.sleep(1.5)"))
    child.communicate(timeout=30)
    assert child.returncode == 0
