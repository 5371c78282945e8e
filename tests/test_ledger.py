"""The ledger: phases add up to the wall clock as measured from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from jaxscale.runtime.ledger import WRITE_SECONDS, Ledger, read_attempts, read_totals
from tests.processes import start

WORK = """
import sys, time
time.sleep(1.0)  # stands for slow imports, before there is a ledger
from pathlib import Path
from jaxscale.runtime.ledger import Ledger
ledger = Ledger()
ledger.keep(Path(sys.argv[1]))
ledger.switch("compile"); time.sleep(1.0)
ledger.switch("step"); time.sleep(0.7)
with ledger.phase("checkpoint"):
    time.sleep(0.4)
    with ledger.phase("wait"):
        time.sleep(0.3)
    time.sleep(0.1)
time.sleep(0.5)
{end}
"""
EXPECTED = {"compile": 1.0, "step": 1.2, "checkpoint": 0.5, "wait": 0.3}


def test_phases_add_up_to_the_wall_clock(tmp_path: Path) -> None:
    """Within one per cent, interpreter start and imports included."""
    path = tmp_path / "run" / "ledger.jsonl"
    began = time.monotonic()
    child = start(WORK.format(end="ledger.close(); import os; os._exit(0)"), str(path))
    child.wait()
    wall = time.monotonic() - began
    totals = read_totals(path)
    assert sum(totals.values()) == pytest.approx(wall, rel=0.01)
    assert totals["start"] > 1.0
    for phase, seconds in EXPECTED.items():
        assert totals[phase] == pytest.approx(seconds, abs=0.1)


def test_killed_attempts_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    wall = 0.0
    for _ in range(2):
        began = time.monotonic()
        child = start(WORK.format(end="print('done', flush=True); time.sleep(60)"), str(path))
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(WRITE_SECONDS)
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        wall += time.monotonic() - began
    assert len(read_attempts(path)) == 2
    lost = wall - sum(read_totals(path).values())
    assert -0.05 < lost < 2 * (WRITE_SECONDS + 0.5)
    assert read_totals(path)["checkpoint"] == pytest.approx(1.0, abs=0.2)


def test_an_error_inside_a_phase_returns_to_the_phase_before() -> None:
    ledger = Ledger()
    ledger.switch("step")
    with pytest.raises(ZeroDivisionError), ledger.phase("evaluate"):
        _ = 1 / 0
    assert ledger.switch("end") == "step"


def test_totals_count_the_current_phase_without_ending_it() -> None:
    ledger = Ledger("first")
    first = ledger.totals()["first"]
    time.sleep(0.05)
    assert ledger.totals()["first"] - first == pytest.approx(0.05, abs=0.03)


def test_a_torn_line_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"started": 1.0, "process": 1, "seconds": {"step": 2.0}}\n{"started": 2.0, "proc')
    ledger = Ledger("step")
    ledger.keep(path)
    ledger.close()
    attempts = read_attempts(path)
    assert len(attempts) == 2
    assert attempts[0] == {"step": 2.0}
