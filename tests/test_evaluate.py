"""Evaluation of sets with several sources: sums over all their tokens, and the loss of each source."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.cli import main
from jaxscale.data.mixture import Mixture
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import ByteTokenizer
from jaxscale.data.writer import DatasetWriter
from jaxscale.train.build import Run
from jaxscale.train.evaluate import evaluate_splits, shared_rows
from tests import tiny
from tests.command import CONFIG
from tests.processes import run_together

EVALUATE = "import sys; from jaxscale.cli import main; sys.exit(main(['eval', sys.argv[1], '--json']))"
CODE, PROSE = ["for x in y:", "return 1", "import os\nimport sys\n" * 3], ["It was a dark night.", "No."] * 4


def dataset(folder: Path, texts: Sequence[str]) -> TokenDataset:
    """Texts as a dataset; its documents fit a row of 64."""
    tokenizer = ByteTokenizer()
    with DatasetWriter(folder, tokenizer, {"settings": {}}) as writer:
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            writer.add(np.append(ids, tokenizer.end_id), len(text.encode()))
    return TokenDataset.open(folder)


@pytest.fixture(scope="module")
def run() -> Run:
    """Of a model with its initial weights; one document a row, so that a document sees the same wherever it lies."""
    return tiny.make_run(tiny.config(mesh={"fsdp": 2}, evaluate={"batch_size": 4}))


def losses(run: Run, **splits: Mixture) -> dict[str, dict[str, float]]:
    """The results of the run's initial model."""
    with jax.set_mesh(run.mesh):
        state = run.initialize()
        model = {"params": state.params, "model_state": state.model_state}
        return evaluate_splits(run, run.evaluation_step, model, splits)


def test_a_set_is_the_sum_of_its_sources(run: Run, tmp_path: Path) -> None:
    """It has the loss of one dataset with the documents of all, its sources have those that they have alone."""
    code, prose = dataset(tmp_path / "code", CODE), dataset(tmp_path / "prose", PROSE)
    both = dataset(tmp_path / "both", CODE + PROSE)
    found = losses(
        run,
        mixed=Mixture({"code": code, "prose": prose}, "one_a_row"),
        both=Mixture({"both": both}, "one_a_row"),
        code=Mixture({"code": code}, "one_a_row"),
        prose=Mixture({"prose": prose}, "one_a_row"),
    )
    assert list(found) == ["mixed", "mixed/code", "mixed/prose", "both", "code", "prose"]
    assert found["mixed/code"] == found["code"] and found["mixed/prose"] == found["prose"] != found["code"]
    assert found["mixed"]["valid_tokens"] == found["both"]["valid_tokens"] == sum(map(len, CODE + PROSE))
    assert found["mixed"]["loss"] == pytest.approx(found["both"]["loss"], rel=1e-6)

    # Bits and bytes by hand: every predicted token stands for the mean bytes of a token of its dataset.
    parts = [(found["code"], code), (found["prose"], prose)]
    bits = sum(one["loss"] * one["valid_tokens"] / math.log(2) for one, _ in parts)
    text = sum(one["valid_tokens"] * data.text_bytes / data.tokens for one, data in parts)
    assert found["mixed"]["bits_per_byte"] == pytest.approx(bits / text, rel=1e-9)


def test_some_rows_of_a_set(run: Run, tmp_path: Path) -> None:
    """`evaluate.rows` are those of the set, taken of its sources in proportion."""
    settings = tiny.config(mesh={"fsdp": 2}, evaluate={"batch_size": 4, "rows": 4})
    mixed = {"code": dataset(tmp_path / "code", CODE), "prose": dataset(tmp_path / "prose", PROSE)}
    found = losses(tiny.make_run(settings), mixed=Mixture(mixed, "one_a_row"))
    assert found["mixed/code"]["valid_tokens"] == len(CODE[0])  # 1 of 3 rows
    assert found["mixed/prose"]["valid_tokens"] == sum(len(PROSE[row]) for row in (0, 2, 5))  # 3 of 8


@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=6), wanted=st.none() | st.integers(1, 300))
def test_rows_are_shared_out(rows: list[int], wanted: int | None) -> None:
    """Each within one of its proportion; as many as wanted, but for sources that give one where they owe less."""
    taken = shared_rows(rows, wanted)
    total, aim = sum(rows), sum(rows) if wanted is None else min(wanted, sum(rows))
    assert all(1 <= count <= there for count, there in zip(taken, rows, strict=True))
    assert all(abs(count - there * aim / total) <= 1 for count, there in zip(taken, rows, strict=True))
    assert aim <= sum(taken) <= aim + sum(there * aim < total for there in rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one update with two splits, one of them of two sources."""
    folder = tmp_path_factory.mktemp("sets")
    for name, texts in {"train": CODE + PROSE, "code": CODE, "prose": PROSE}.items():
        dataset(folder / name, texts)
    (folder / "config.toml").write_text(
        f'name = "sets"\nruns_dir = "{folder}/runs"\n'
        "[model]\nvocabulary_size = 260\nembed_dim = 16\nlayers = 1\nheads = 2\nmlp_dim = 16\n"
        f'[data]\ntrain = "{folder}/train"\nsequence_length = 16\n'
        f'[data.validation]\nalone = "{folder}/code"\n'
        f'[data.validation.mixed]\nprose = "{folder}/prose"\ncode = "{folder}/code"\n'
        "[batch]\nglobal_size = 8\n[train]\nsteps = 1\n[cluster]\ncompilation_cache = 'none'\n"
    )
    assert main(["train", str(folder / "config.toml")]) == 0
    return folder / "runs" / "sets"


def written(run_dir: Path) -> dict[str, dict[str, float]]:
    """The lines of the run's evaluation, by split."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["split"]: line for line in lines if "split" in line}


def test_from_the_command_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training writes a line for the set and one for each source, and `eval` says the same."""
    lines = written(trained)
    assert list(lines) == ["alone", "mixed", "mixed/code", "mixed/prose"]
    assert lines["alone"]["loss"] == lines["mixed/code"]["loss"]
    assert main(["eval", str(trained), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == list(lines)
    for name, found in facts.items():
        assert {key: lines[name][key] for key in found} == found


@pytest.mark.slow
def test_two_processes(trained: Path) -> None:
    """Each with half of every batch, both say what one process says."""
    lines = written(trained)
    for output in run_together(2, EVALUATE, str(trained)):
        facts = json.loads(output[output.index("{") : output.rindex("}") + 1])
        assert list(facts) == list(lines)
        for name, found in facts.items():
            assert found == pytest.approx({key: lines[name][key] for key in found}, rel=1e-5)
            assert found["valid_tokens"] == lines[name]["valid_tokens"]


def test_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source whose ids mean something else is refused by its key before anything is made."""
    for name in ("train", "code", "prose"):
        dataset(tmp_path / name, CODE)
    manifest = json.loads((tmp_path / "prose/dataset.json").read_text())
    manifest["tokenizer"]["fingerprint"] = "0" * 64
    (tmp_path / "prose/dataset.json").write_text(json.dumps(manifest))
    arguments = [f"runs_dir={tmp_path}/runs", "model.vocabulary_size=384", "data.build=none", "sample.prompt=none"]
    arguments += [f"data.train={tmp_path}/train", "data.sequence_length=16", "data.validation.validation=none"]
    arguments += [f'data.validation.all={{code="{tmp_path}/code", prose="{tmp_path}/prose"}}']
    assert main(["train", str(CONFIG), *arguments]) == 2
    assert "data.validation.all.prose" in (said := capsys.readouterr().err) and "another tokenizer" in said
    assert not list((tmp_path / "runs").rglob("checkpoints/*"))
