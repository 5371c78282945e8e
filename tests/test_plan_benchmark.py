"""The planner's formulas against published runs: the command runs, and says what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_command(tmp_path: Path) -> None:
    """Kendall's tau and errors are of the published rows themselves; the picture is there."""
    picture = tmp_path / "scatter.png"
    command = [sys.executable, "-m", "benchmarks.plan_layouts", "--json", "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    facts = json.loads(done.stdout)
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {row["id"]: row for row in facts["rows"]}
    assert rows["sc21-t1-145B"]["published_seconds"] == 24.817
    assert facts["shape"]["runs"] >= 80
    assert facts["shape"]["mean_error"] < 0.10
    assert facts["memory"]["runs"] == 251 and facts["memory"]["agree"] >= 0.90
    assert not set(rows) & set(facts["left_out"])
