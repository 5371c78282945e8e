"""metrics.jsonl: strict JSON, every step at most once, whatever was killed when."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

from jaxscale.runtime.metrics import MetricsFile, read
from tests.processes import start


def test_lines_are_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in (1, 2):
        metrics.write({"step": step, "loss": 1.5 / step, "mfu": None})
        assert read(path)[-1] == {"step": step, "loss": 1.5 / step, "mfu": None}
    metrics.close()


def test_not_finite_is_null_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "examples": 2**60})
    text = path.read_text()
    line = json.loads(text, parse_constant=lambda token: pytest_fail(token))
    assert line == {"step": 1, "loss": None, "grad_norm": None, "examples": 2**60, "finite": False}


def pytest_fail(token: str) -> None:
    """A token like NaN breaks JSON readers of other languages."""
    raise AssertionError(f"{token} is not JSON")


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    """Checkpoint at 10, crash at 14, on to 20: every step once, with its last value, in order."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(1, 15):
        metrics.write({"step": step, "loss": 1.0})
        if step % 5 == 0:
            metrics.write({"step": step, "split": "validation", "loss": 2.0})
    metrics = MetricsFile(path, resume_step=10)
    for step in range(11, 21):
        metrics.write({"step": step, "loss": 3.0})
    metrics.close()
    training = [line for line in read(path) if "split" not in line]
    assert [line["step"] for line in training] == list(range(1, 21))
    assert [line["loss"] for line in training] == [1.0] * 10 + [3.0] * 10
    assert [line["step"] for line in read(path) if "split" in line] == [5, 10]


def test_new_run_starts_empty(tmp_path: Path) -> None:
    """A run that died before its first checkpoint starts over."""
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).write({"step": 1, "loss": 1.0})
    MetricsFile(path)
    assert read(path) == []


def test_half_written_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert read(path) == [{"step": 1, "loss": 1.0}]
    metrics = MetricsFile(path, resume_step=5)
    metrics.write({"step": 2, "loss": 2.0})
    metrics.close()
    assert [line["step"] for line in read(path)] == [1, 2]


def test_killed_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import sys, itertools\nfrom pathlib import Path\nfrom jaxscale.runtime.metrics import MetricsFile\n"
        "metrics = MetricsFile(Path(sys.argv[1]), int(sys.argv[2]))\n"
        "for step in itertools.count(int(sys.argv[2]) + 1):\n"
        "    metrics.write({'step': step, 'loss': 1.0})\n"
        "    print(step, flush=True)\n"
    )
    resume = 0
    for _ in range(3):
        child = start(script, str(path), str(resume))
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(50)][-1]
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        steps = [line["step"] for line in read(path)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= seen  # a step that was shown is on disk
        resume = len(steps) - 7
