"""A run held against its plan."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jaxscale.config.errors import Refused
from jaxscale.plan.check import check
from jaxscale.runtime.metrics import MetricsFile

FACTS: dict[str, Any] = {"tokens_an_update": 1000, "time": {"step_seconds": 0.5}}


def write(folder: Path, seconds: list[float], tokens: int = 1000, waits: float = 0.25) -> Path:
    """A run with these times, a line for every second update, an evaluation in between."""
    with closing(MetricsFile(folder / "metrics.jsonl")) as metrics:
        for number, value in enumerate(seconds, 1):
            step = 2 * number
            times = {"step_seconds": value + waits, "data_wait_seconds": waits}
            metrics.write({"step": step, "tokens": step * tokens, "loss": 1.0, **times})
            metrics.write({"step": step, "tokens": step * tokens, "split": "validation", "loss": 2.0})
    return folder


def test_the_median_of_what_is_not_waiting(tmp_path: Path) -> None:
    """The first updates do not count, nor does the time that an update waited for its data."""
    found = check(write(tmp_path, [9.0, 8.0, 7.0, 6.0, 5.0, *(0.6 + 0.01 * number for number in range(21))]), FACTS)
    assert found["updates"] == 21 and found["planned_seconds"] == 0.5
    assert found["measured_seconds"] == pytest.approx(0.7) and found["ratio"] == pytest.approx(1.4)
    assert 0.6 <= found["fastest_seconds"] < 0.63 and 0.77 < found["slowest_seconds"] <= 0.8


def test_nothing_to_compare(tmp_path: Path) -> None:
    """A short run, one with another batch, and a plan without times."""
    (tmp_path / "short").mkdir()
    (tmp_path / "other").mkdir()
    for folder, facts, says in (
        (write(tmp_path / "short", [0.5] * 6), FACTS, "has 6 updates"),
        (write(tmp_path / "other", [0.5] * 20, tokens=500), FACTS, "the 1,000 tokens that were planned"),
        (tmp_path / "other", {**FACTS, "time": None}, "needs --cluster"),
        (tmp_path / "none", FACTS, "has 0 updates"),
    ):
        with pytest.raises(Refused, match=says):
            check(folder, facts)
