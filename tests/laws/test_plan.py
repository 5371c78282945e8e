"""The law *plan*: what `plan` compiles is what `train` runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxscale.cli import main
from jaxscale.config.load import load
from jaxscale.config.schema import ClusterConfig
from jaxscale.model.attention import Mask, attention
from jaxscale.plan.compile import build_without_data
from jaxscale.plan.plan import in_one_process
from tests import tiny

CONFIG = """
name = "planned"
runs_dir = "{folder}/runs"

[model]
vocabulary_size = 260
embed_dim = 32
layers = 2
heads = 4
mlp_dim = 64

[data]
train = "{folder}/dataset"
sequence_length = 32

[data.build]
files = ["{folder}/text/*.txt"]

[batch]
global_size = 16

[train]
steps = 2

[cluster]
compilation_cache = "none"
"""

ENCODER = (
    "model.causal=false",
    "model.positions=learned",
    "model.max_positions=32",
    "objective.kind=masked",
    "train.steps=none",
    "train.epochs=0.05",
    "schedule.warmup=1 step",
)
MESH = ("mesh.replica=2", "mesh.fsdp=2", "mesh.tensor=2", "batch.microbatch=2")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config whose text is there and whose dataset is not."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 40)
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


@contextmanager
def compiled_programs(folder: Path) -> Iterator[None]:
    """JAX writes every program that it compiles into a folder, with its own switch for that."""
    jax.config.update("jax_dump_ir_to", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_dump_ir_to", "")


def step_that(verb: str, config: Path, *overrides: str) -> str:
    """The training step that a verb compiles, from the command line to the compiler, without source locations."""
    folder = config.parent / f"programs of {verb}" / str(len(list(config.parent.glob("programs*/*"))))
    with compiled_programs(folder):
        assert main([verb, str(config), *overrides]) == 0
    (program,) = folder.glob("*train_step*")
    lines = [line for line in program.read_text().splitlines() if not line.startswith("#loc")]
    return re.sub(r" loc\((?:#loc\d*|callsite\([^()]*\)|\"[^\"]*\"\(#loc\d*\))\)", "", "\n".join(lines))


def test_plan_compiles_what_train_runs(config: Path) -> None:
    """The same program to the letter, before there is a dataset, on a mesh of three axes and in microsteps."""
    planned = step_that("plan", config, *MESH)
    assert not (config.parent / "dataset").exists()
    assert step_that("train", config, *MESH) == planned


def test_plan_compiles_what_train_runs_where_data_decide(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs and the mask token are the dataset's; without it, memory and collectives are the same."""

    def planned() -> tuple[str, dict[str, Any]]:
        program = step_that("plan", config, *ENCODER, "--json")
        facts = json.loads(capsys.readouterr().out)
        return program, {name: facts[name] for name in facts.keys() - {"compile_seconds", "compiler_memory", "updates"}}

    before, facts_before = planned()
    trained = step_that("train", config, *ENCODER)
    capsys.readouterr()
    after, facts_after = planned()
    assert after == trained != before
    assert facts_after == facts_before and facts_after["collectives"]


def lowered(*overrides: str) -> str:
    """The step that `plan` would compile for the tiny decoder of the repository, whose dataset is not there."""
    config = load(tiny.repository() / "configs/tiny/decoder.toml", ["data.train=none", "model.layers=2", *overrides])
    run = build_without_data(config, jax.devices())
    return str(run.lower_train_step(run.batch(0)).as_text())


def test_what_matters_changes_the_program() -> None:
    """Every knob of the step is in the program that is planned; none that belongs to the loop is."""
    base = lowered()
    knobs = [
        "mesh.tensor=2",
        "mesh.replica=2",
        "batch.microbatch=1",
        "batch.global_size=32",
        "data.sequence_length=128",
    ]
    knobs += ["model.remat=full", "model.unroll=2", "model.dropout=0.1", "model.tied_embeddings=true", "seed=1"]
    knobs += ["precision.compute=bfloat16", "optimizer.clip_norm=none", "optimizer.beta2=0.99", "schedule.kind=linear"]
    knobs += [
        "objective.z_loss=1e-4",
        "objective.logits_chunk=64",
        "data.attend_across_documents=true",
        "train.steps=99",
    ]
    assert [knob for knob in knobs if knob != "seed=1" and lowered(knob) == base] == []
    # The seed enters the step with masks and dropout only.
    assert lowered("seed=1") == base and lowered("model.dropout=0.1", "seed=1") != lowered("model.dropout=0.1")
    loop = ("name=other", "data.read_threads=2", "checkpoint.every_steps=1", "metrics.batch_digest=true")
    assert lowered(*loop) == base


def test_no_data_no_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A published config plans where nothing of its data exists, and leaves nothing behind."""
    gpt2 = str(tiny.repository() / "configs/gpt2/124m.toml")
    small = ["model.layers=1", "model.embed_dim=64", "model.heads=4", "model.mlp_dim=64", "data.sequence_length=64"]
    where = [f"runs_dir={tmp_path}/runs", f"data.train={tmp_path}/none", "cluster.compilation_cache=none"]
    alive = {id(array) for array in jax.live_arrays()}
    assert main(["plan", gpt2, *small, *where, "batch.microbatch=none", "batch.global_size=8"]) == 0
    assert {id(array) for array in jax.live_arrays()} <= alive
    assert list(tmp_path.iterdir()) == []
    page = capsys.readouterr().out
    assert "8 x cpu" in page and "fsdp 8" in page and max(map(len, page.splitlines())) <= 80


def test_what_train_refuses_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The devices decide in `plan` as they do in `train`."""
    cudnn = ["model.attention=cudnn", "data.attend_across_documents=true", "precision.compute=bfloat16"]
    for overrides, says in (
        (cudnn, "the mesh's devices are cpu devices"),
        (["mesh.fsdp=16"], "there are 8"),
    ):
        assert main(["plan", str(config), *overrides]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "platform"), [("NVIDIA H100 80GB HBM3", "gpu"), ("cpu", "cpu")])
def test_kernels_follow_the_mesh(kind: str, platform: str) -> None:
    """A mesh of absent GPUs gets cuDNN's attention in a process that has only CPUs, a mesh of CPUs never does."""
    assert jax.default_backend() == "cpu"
    heads = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    devices = AbstractMesh((1,), ("fsdp",), abstract_device=AbstractDevice(kind, None, platform))
    with jax.sharding.use_abstract_mesh(devices):
        try:
            program = str(jax.make_jaxpr(lambda q, k, v: attention(q, k, v, Mask(causal=True)))(heads, heads, heads))
        except RuntimeError as error:  # JAX looks for the library while it traces
            program = str(error)
    assert ("cuDNN is not detected" in program or "dot_product_attention" in program) == (platform == "gpu")


def test_processes_are_planned_as_one() -> None:
    """A plan joins nobody: it is made for the simulated devices of all processes."""
    cluster = ClusterConfig(processes=4, simulate=2, coordinator="host:7733", process_id=3)
    alone = in_one_process(cluster)
    assert (alone.processes, alone.process_id, alone.coordinator, alone.simulate) == (1, 0, None, 8)
    assert in_one_process(ClusterConfig(processes=4)).simulate is None
