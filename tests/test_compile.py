"""Compiling for GPUs that are not there, with the real compiler; needs the extra `plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxscale.cli import main
from jaxscale.config.load import load
from jaxscale.hardware import known
from jaxscale.plan.compile import Compiled, compile_for, has_gpu_compiler
from jaxscale.plan.program import read_program
from jaxscale.plan.replay import replay
from tests import tiny

pytestmark = pytest.mark.skipif(not has_gpu_compiler(), reason="needs the extra plan; .ci/run installs it")

LLAMA = str(tiny.repository() / "configs/llama3/8b.toml")
SMALL = (
    "model.layers=4",
    "model.embed_dim=1024",
    "model.heads=16",
    "model.kv_heads=8",
    "model.mlp_dim=4096",
    "model.vocabulary_size=32000",
    "data.sequence_length=2048",
    "data.attend_across_documents=true",
    "batch.global_size=32",
    "batch.microbatch=2",
)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """A small decoder in 2 microsteps on 8 H100s, its parameters sharded over all."""
    return compile_for(load(LLAMA, SMALL), known().cluster("h100-sxm:1x8"))


def test_memory_is_the_compilers(compiled: Compiled) -> None:
    """Parameters and moments by hand, 4 and 8 bytes over 8 devices; the parts are all that the compiler counts."""
    layer = 1024 * (2 * 1024 + 2 * 512 + 3 * 4096) + 2 * 1024
    parameters = 4 * layer + 2 * 32_000 * 1024 + 1024
    assert compiled.platform == "gpu" and compiled.axes["fsdp"] == 8 and compiled.microsteps == 2
    assert compiled.memory["parameters"] == pytest.approx(parameters * 4 / 8, rel=1e-6)
    assert compiled.memory["optimizer"] == pytest.approx(2 * parameters * 4 / 8, rel=1e-6)
    assert compiled.peak == sum(compiled.memory.values()) > 12 * parameters / 8


def test_what_the_replay_counts(compiled: Compiled) -> None:
    """FLOPs of a step by hand: every product three times and the blocks' once more, as they are computed again."""
    found = replay(read_program(compiled.program), known().cluster("h100-sxm:1x8"), compiled.axes, lambda origin: False)
    tokens, heads, width = 2 * 2 * 2048, 16, 64
    matrices = 4 * 1024 * (2 * 1024 + 2 * 512 + 3 * 4096)
    # cuDNN's attention: 2 products forward, twice, and 5 backward; half of them, as it is causal.
    attention = (2 + 2 + 5) * 2 * tokens * 2048 / 2 * heads * width * 4
    head = 2 * tokens * 32_000 * 1024 * 3
    expected = 2 * tokens * matrices * 4 + attention + head
    # What need not be computed again is not: of each block the last product.
    assert expected - 2 * tokens * 4 * 1024 * 4096 * 1.01 <= found.flops <= expected * 1.01
    assert found.parts["matmul"] > found.parts["attention"] > 0
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert set(found.communication) == {"fsdp"}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The facts that the command prints."""
    assert main(["plan", LLAMA, "--json", *arguments]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_a_faster_cluster_is_faster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same program on H100s, on H200s with more memory, and over a slow network."""
    slow = tmp_path / "slow.toml"
    slow.write_text('[cluster.slow]\ngpu = "h100-sxm"\ngpus_a_host = 2\nnetwork_bandwidth = 1e9\n')
    fast = plan(capsys, *SMALL, "--cluster", "h100-sxm:4x2", "--timeline", str(tmp_path / "step.json"))
    slower = plan(capsys, *SMALL, "--cluster", "slow:4", "--hardware", str(slow))
    assert slower["time"]["step_seconds"] > 2 * fast["time"]["step_seconds"]
    memory = fast["memory"]
    assert sum(size for name, size in memory.items() if name not in ("peak", "capacity")) == memory["peak"]
    assert memory["gradients"] > 0 and memory["saved_activations"] > 0
    assert slower["memory"]["peak"] == fast["memory"]["peak"] < fast["memory"]["capacity"]
    assert any("waits for the axis fsdp" in text for text in slower["advice"])
    assert {event["ph"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]} == {"M", "X"}


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown GPU, an impossible cluster, a mesh that does not fit: exit code 2 and what is nearest."""
    for arguments, says in {
        ("--cluster", "h100:1x8"): "nearest: h100-",
        ("--cluster", "h100-sxm:0x8"): "GPU:HOSTSxGPUS",
        ("--cluster", "h100-sxm:1x8", "mesh.fsdp=16"): "there are 8",
        ("--cluster", "tx-gain"): "NAME:HOSTS",
    }.items():
        assert main(["plan", LLAMA, *SMALL, *arguments]) == 2
        assert says in capsys.readouterr().err


def test_other_starts_of_jax_stay_quiet(tmp_path: Path) -> None:
    """The plugin is installed and there is no driver: a command that does not plan prints no traceback."""
    environment = {key: value for key, value in os.environ.items() if key not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    config = str(tiny.repository() / "configs/tiny/decoder.toml")
    command = [sys.executable, "-m", "jaxscale", "plan", config, "model.layers=1"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stderr == "" and "Memory of a device" in done.stdout
