"""A build by a job array: what datatrove submits is run as it stands, by a SLURM that consists of three scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale.config.data import BuildConfig, SlurmBuildConfig
from jaxscale.data.build.prepare import build, prepare_tokenizer
from tests.test_build import texts
from tests.test_prepare import config, contents, jsonl

# Submitted arrays are written down; `run_arrays` is the scheduler.
SBATCH = """#!/bin/sh
for last; do :; done
number=$(ls "$QUEUE" | wc -l)
cp "$last" "$QUEUE/$number"
echo "Submitted batch job $number"
"""
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -n ] && shift; shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo localhost
"""
SQUEUE = """#!/bin/sh
[ -f "$QUEUE/$3" ] && [ ! -f "$QUEUE/$3.done" ] && echo "$3 is in the queue"
exit 0
"""


def run_arrays(queue: Path) -> list[int]:
    """Run what is in the queue, job by job, each element of its array; returns the exit codes."""
    codes = []
    for script in sorted(path for path in queue.iterdir() if path.suffix == ""):
        if script.with_suffix(".done").exists():
            continue
        (array,) = (line for line in script.read_text().splitlines() if line.startswith("#SBATCH --array="))
        for element in range(int(array.split("-")[-1].split("%")[0]) + 1):
            environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(element), "SLURM_NODELIST": "n1", "RUN_OFFSET": "0"}
            codes.append(subprocess.run(["bash", script], env=environment, capture_output=True).returncode)
        script.with_suffix(".done").touch()
    return codes


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, script in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "queue").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(tmp_path / "queue"))
    return tmp_path / "queue"


@pytest.mark.slow
def test_a_job_array_builds_the_same_dataset(tmp_path: Path, queue: Path) -> None:
    files = jsonl(tmp_path / "d.jsonl", [*texts(60), *texts(5)])
    common = {"files": (files,), "tokenizer": str(tmp_path / "t.json"), "train_vocabulary": 300, "task_bytes": 6000}
    prepare_tokenizer(BuildConfig(**common))
    build(config(tmp_path / "here", **common, remove_duplicates=True))
    (tmp_path / "b.toml").write_text(
        f"""
        [data]
        train = "{tmp_path}/there/train"
        [data.build]
        files = ["{files}"]
        tokenizer = "{tmp_path}/t.json"
        train_vocabulary = 300
        task_bytes = 6000
        remove_duplicates = true
        executor = "slurm"
        slurm = {{partition = "cpu", options = {{account = "abc"}}}}
        """
    )

    def command(*overrides: str) -> tuple[int, str]:
        arguments = [sys.executable, "-m", "jaxscale", "data", "build", str(tmp_path / "b.toml"), *overrides]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    code, said = command()
    assert code == 75 and "submitted as job 2;" in said, said
    script = (queue / "0").read_text()
    assert "#SBATCH --partition=cpu" in script and "#SBATCH --account=abc" in script
    code, said = command()
    assert code == 75 and "job 2 is at work" in said, said
    assert set(run_arrays(queue)) == {0}
    code, said = command()
    assert code == 0, said
    assert contents(tmp_path / "there" / "train") == contents(tmp_path / "here" / "train")


@pytest.mark.slow
def test_what_fails_in_an_element_is_told_by_the_next_command(tmp_path: Path, queue: Path) -> None:
    from jaxscale.config.errors import Refused, StoppedEarly

    path = Path(jsonl(tmp_path / "d.jsonl", texts(40)))
    path.write_text(path.read_text() + '{"text": null}\n')
    slurm = SlurmBuildConfig(partition="cpu")
    data = config(tmp_path, files=(str(path),), task_bytes=6000, executor="slurm", slurm=slurm)
    with pytest.raises(StoppedEarly, match="submitted as job 0"):
        build(data)
    assert run_arrays(queue)[-1] != 0
    with pytest.raises(Refused, match=r"d\.jsonl:41: 'text' is null"):
        build(data)
    with pytest.raises(StoppedEarly, match=r"submitted as job \d+; tasks to do: 1 of"):
        build(data)
