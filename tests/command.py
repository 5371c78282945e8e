"""The command line in real processes, on a tiny run that starts fast."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import REPOSITORY, environment

CONFIG = REPOSITORY / "configs" / "tiny" / "decoder.toml"
SMALLER = (
    "model.layers=1",
    "model.embed_dim=32",
    "model.mlp_dim=64",
    "model.heads=4",
    "data.sequence_length=32",
    "batch.global_size=8",
    "schedule.kind=constant",
    "schedule.warmup=2",
    "evaluate.rows=8",
    "metrics.batch_digest=true",
    "train.steps=16",
)


class Workplace:
    """A folder with runs, a dataset and a cache of compiled programs; commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.always = (*SMALLER, "cluster.compilation_cache=compiled", "runs_dir=runs")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `jaxscale ARGUMENTS` with stdout and stderr in one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "jaxscale", *arguments],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_training(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        """Starts `jaxscale train` of the tiny run under a name."""
        return self.start("train", str(CONFIG), *self.always, f"name={name}", *overrides)

    def train(self, name: str, *overrides: str, processes: int = 1, code: int = 0) -> str:
        """Trains the tiny run to its end, which must have this exit code; returns what was printed."""
        verb = ["train"] if processes == 1 else ["launch", "local", "--processes", str(processes)]
        process = self.start(*verb, str(CONFIG), *self.always, f"name={name}", *overrides)
        return finish(process, code)

    def run_dir(self, name: str) -> Path:
        """The directory of a run."""
        return self.folder / "runs" / name

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The lines of a run's training updates."""
        lines = (self.run_dir(name) / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "split" not in line]

    def steps_done(self, name: str) -> int:
        """The last whole line of metrics.jsonl, read while the run may be writing; 0: none."""
        try:
            text = (self.run_dir(name) / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return 0
        lines = text[: text.rfind("\n") + 1].splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def checkpoints(self, name: str) -> list[int]:
        """Complete checkpoints, by the rule of the file system: folders whose name is a number."""
        folder = self.run_dir(name) / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.exists() else []


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Waits for the end, which must have this exit code; returns what was printed."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Waits until the condition holds; fails if the process ends before, or time runs out."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "out of time"
        time.sleep(0.005)


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what a clock says."""
    clock = ("time", "step_seconds", "data_wait_seconds", "tokens_per_second")
    return {key: value for key, value in line.items() if key not in clock}
