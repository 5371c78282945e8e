"""Plans for a GPU that the compiler does not know: the step of simulated devices, and times by formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxscale.cli import main
from jaxscale.config.errors import Refused
from jaxscale.hardware import known
from jaxscale.plan.analytical import estimate
from jaxscale.plan.compile import Compiled
from jaxscale.plan.page import page
from jaxscale.plan.plan import layout_of
from jaxscale.report.timeline import write_timeline
from tests import tiny

DECODER = str(tiny.repository() / "configs/tiny/decoder.toml")


def test_a_gpu_without_a_compiler(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The page says that all is approximate; the time is the formulas' for the mesh and batch of the config."""
    command = ["plan", DECODER, "--cluster", "mi300x:1x4", "mesh.replica=2", "mesh.fsdp=2", "model.layers=1"]
    command += [f"data.train={tmp_path}/none", "batch.microbatch=2", "batch.global_size=16"]
    assert main([*command, "--json", "--price", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    lines = page(facts).splitlines()
    assert any("4 x mi300x" in line for line in lines) and any("by formulas" in line for line in lines)
    assert max(map(len, lines)) <= 80
    config = tiny.config(tiny.DECODER, mesh={"replica": 2, "fsdp": 2}, batch={"global_size": 16, "microbatch": 2})
    axes = {"pipe": 1, "replica": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}
    layout = layout_of(config, Compiled("cpu", "cpu", axes, 2, 8, 64, {}, 0.0, 0, ""))
    assert (layout.microbatch, layout.microsteps, layout.shard, layout.gpus) == (2, 2, "parameters", 4)
    found = estimate(config.model, 64, layout, known().cluster("mi300x:1x4"))
    assert facts["microsteps"] == 2 and sum(facts["time"]["parts"].values()) == pytest.approx(
        facts["time"]["step_seconds"]
    )
    assert set(facts["time"]["parts"]) <= set(found.parts) and facts["money"]["cost"] > 0
    with pytest.raises(Refused, match="there are no times to draw"):
        write_timeline(tmp_path / "step.png", [])
