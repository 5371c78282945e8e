"""Law of refusal, first stage: what cannot be right is refused by the config alone, exit 2, before jax is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

BASE = """
name = "base"

[model]
vocabulary_size = 500
embed_dim = 48
layers = 2
heads = 6
kv_heads = 6
mlp_dim = 96

[data]
train = "datasets/base"
sequence_length = 64

[batch]
global_size = 8

[train]
steps = 10
"""

RUN_ALL = """
import contextlib, io, json, sys
from jaxscale.cli import main

results = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    results.append([code, out.getvalue(), err.getvalue(), "jax" in sys.modules])
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Case:
    """Something wrong, and what the message must say."""

    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    text: str | None = None
    """A file of its own; unset: the base file."""


def wrong(override: str, *says: str, also: tuple[str, ...] = ()) -> Case:
    """A wrong override, and others that it needs."""
    return Case(says, (override, *also))


def file(text: str, *says: str) -> Case:
    """A file laid over the base that is wrong; the message must hold its name too."""
    return Case((*says, "wrong.toml:"), text=f'extends = "base.toml"\n{text}')


LEARNED = ("model.positions=learned", "model.max_positions=64")
ENCODER = ("model.causal=false", "objective.kind=masked")
WSD = ("schedule.kind=warmup_stable_decay",)

CASES = {
    # Keys: misspelt, in the wrong section, in another trainer's words.
    "misspelt key": wrong(
        "optimizer.weigth_decay=0", "optimizer.weigth_decay: there is no such key", "optimizer.weight_decay"
    ),
    "misspelt section": wrong("optimiser.learning_rate=1e-3", "nearest: optimizer.learning_rate"),
    "no section": wrong("learning_rate=1e-3", "nearest: optimizer.learning_rate"),
    "wrong section": wrong("model.learning_rate=1e-3", "nearest: optimizer.learning_rate"),
    "dash": wrong("optimizer.weight-decay=0", "nearest: optimizer.weight_decay"),
    "another trainer's name": wrong("lr=1e-3", "nearest: optimizer.learning_rate"),
    "unknown section": wrong("foo.bar=1", "foo.bar: there is no such key", "sections: name, runs_dir"),
    "key below a value": wrong("name.first=1", "name.first: there is no such key"),
    "no equals sign": wrong("train.steps", "an override is written key=value"),
    "no key": wrong("=3", "there is no such key"),
    "option instead of override": Case(("--train.steps=3", "nearest: train.steps=3"), ("--train.steps=3",)),
    "option with dashes": Case(("nearest: train.steps=VALUE",), ("--train-steps", "3")),
    "misspelt key in a file": file(
        "[optimizer]\nweigth_decay = 0", "wrong.toml:3: optimizer.weigth_decay", "weight_decay"
    ),
    "misspelt section in a file": file(
        "[optimiser]\nbeta1 = 0", "wrong.toml:2: optimiser: there is no such key", "optimizer"
    ),
    "no section in a file": file("learning_rate = 0", "wrong.toml:2: learning_rate = 0", "optimizer.learning_rate"),
    "dash in a file": file("num-epochs = 3", "wrong.toml:2: num-epochs = 3", "nearest: train.epochs"),
    "misspelt extends": file('extend = "x.toml"', "nearest: extends"),
    # Values: types, ranges, choices; file and command line alike.
    "text for a number": wrong("train.steps=many", 'train.steps = "many": must be a valid integer'),
    "quoted number": wrong(
        'optimizer.learning_rate="1e-4"', 'optimizer.learning_rate = "1e-4": must be a valid number'
    ),
    "octal": wrong("train.steps=010", 'train.steps = "010"'),
    "uneven float": wrong("train.steps=1.5", "train.steps = 1.5: must be a valid integer"),
    "no": wrong("model.bias=no", 'model.bias = "no": must be a valid boolean'),
    "one for true": wrong("model.bias=1", "model.bias = 1: must be a valid boolean"),
    "true for a number": wrong("train.steps=true", "train.steps = true: must be a valid integer"),
    "zero": wrong("batch.global_size=0", "batch.global_size = 0: must be greater than or equal to 1"),
    "zero steps": wrong("train.steps=0", "train.steps = 0: must be greater than or equal to 1"),
    "negative": wrong("optimizer.learning_rate=-1", "must be greater than or equal to 0"),
    "not a number": wrong("optimizer.learning_rate=nan", "must be a finite number"),
    "infinite": wrong("optimizer.learning_rate=inf", "must be a finite number"),
    "dropout of one": wrong("model.dropout=1.0", "must be less than 1"),
    "large seed": wrong("seed=4294967296", "must be less than 4294967296"),
    "choice": wrong("model.remat=ful", "'none', 'dots' or 'full'", "nearest: full"),
    "objective": wrong("objective.kind=mask", 'objective.kind = "mask"', "'causal', 'masked'", "nearest: masked"),
    "objective of a number": wrong("objective=3", "objective = 3: must be a section"),
    "kind of a list": wrong("objective.kind=[1]", "objective.kind = [1]: must be"),
    "name": wrong("name=a/b", 'name = "a/b": must match pattern'),
    "section for a value": wrong("model=3", "model = 3: must be a section"),
    "unset a needed key": wrong("model.layers=none", 'model.layers = "none": must be a valid integer'),
    "unset variable": wrong("data.train=$NO_SUCH_VARIABLE/x", "the environment variable $NO_SUCH_VARIABLE is not set"),
    "empty path": wrong("data.train=", "data.train", "must be a path"),
    "number for a path": file("runs_dir = 3", "wrong.toml:2: runs_dir = 3: must be a path"),
    "date": file("seed = 2024-01-01", "wrong.toml:2: seed"),
    "value for a section": file("data = 3", "wrong.toml:2: data = 3: must be a section"),
    # Files.
    "duplicate key": file("seed = 1\nseed = 2", "wrong.toml:3: not valid TOML", "seed = 2"),
    "duplicate section": file("[mesh]\n[mesh]", "wrong.toml:3: not valid TOML", "[mesh]"),
    "not TOML": file("seed: 1", "wrong.toml:2: not valid TOML", "seed: 1"),
    "extends nothing": Case(("no_such.toml", "No such file"), text='extends = "no_such.toml"'),
    "extends near": Case(("bas.toml", "nearest:", "base.toml"), text='extends = "bas.toml"'),
    "extends a number": Case(("wrong.toml:1: extends = 3", "must be a file or a list of files"), text="extends = 3"),
    "circle": Case(("closes a circle", "wrong.toml"), text='extends = "wrong.toml"'),
    "empty": Case(("name: is missing", "model: is missing", "batch: is missing"), text=""),
    "missing key": Case(
        ("wrong.toml:2: model.mlp_dim: is missing: Hidden width",), text='name = "a"\n[model]\nlayers = 1'
    ),
    # The model.
    "heads": wrong("model.heads=5", "model.heads = 5: must divide model.embed_dim = 48", "nearest: ", "4, 6"),
    "kv heads": wrong("model.kv_heads=4", "model.kv_heads = 4: must divide model.heads = 6", "2, 3, 6"),
    "odd head for rope": wrong(
        "model.head_dim=7", "model.head_dim = 7: rotary positions need an even head width", "6 or 8"
    ),
    "no table": wrong("model.positions=learned", "model.max_positions", "at least 64"),
    "nothing to predict": wrong("data.sequence_length=1", "there is nothing to predict; at least 2"),
    "short table": wrong("model.max_positions=32", "at least data.sequence_length = 64", also=LEARNED[:1]),
    "table with rope": wrong("model.max_positions=64", 'is for positions = "learned"'),
    "rope with a table": wrong("model.rope.theta=5e5", "model.rope: is for positions", also=LEARNED),
    "scaling bounds": wrong(
        "model.rope.low_frequency_factor=8.0", "must be below model.rope.high_frequency_factor = 4.0"
    ),
    "head of BERT": wrong("model.head_transform=true", "model.activation", "gelu"),
    "cudnn on CPUs": wrong("model.attention=cudnn", "cluster.simulate", "nearest: ", also=("cluster.simulate=1",)),
    "cudnn in float32": wrong("model.attention=cudnn", "bfloat16", also=("precision.compute=float32",)),
    # The objective.
    "causal encoder": wrong("model.causal=false", "objective.kind", "encoder"),
    "masked decoder": wrong("objective.kind=masked", "needs an encoder", "model.causal = false"),
    "shares": wrong("objective.random_share=0.3", "more than all tokens; at most 0.2", also=ENCODER),
    "mask id": wrong("objective.mask_id=500", "must be below model.vocabulary_size = 500", also=ENCODER),
    "encoder's prompt": wrong("sample.prompt=hello", "cannot continue a text", also=ENCODER),
    # Length and schedule.
    "two lengths": wrong("train.epochs=1.0", "only one of train.steps, train.tokens, train.epochs"),
    "no length": wrong("train.steps=none", "one of train.steps, train.tokens, train.epochs must be given"),
    "length in words": wrong("schedule.warmup=a few", "schedule.warmup", "10M tokens"),
    "negative warm-up": wrong("schedule.warmup=-1", "schedule.warmup = -1", "at least 0"),
    "half a step": wrong("schedule.warmup=0.5 steps", "a whole number of steps"),
    "long warm-up": wrong("schedule.warmup=11", "takes 11 updates of a run of 10; at most 10"),
    "long warm-up in tokens": wrong("schedule.warmup=10k tokens", "takes 20 updates of a run of 10"),
    "warm-up and decay": wrong("schedule.decay=6", "at most 5 here", also=(*WSD, "schedule.warmup=5")),
    "no decay": wrong(WSD[0], "schedule.decay: kind = ", "needs it"),
    "decay of nothing": wrong("schedule.decay=0", "at least one update", also=WSD),
    "decay elsewhere": wrong("schedule.decay=5", "warmup_stable_decay"),
    "final share": wrong("schedule.final_share=0.5", "does not decay", also=("schedule.kind=constant",)),
    # Mesh, batch, processes.
    "axis not built": wrong("mesh.context=2", "mesh.context = 2: this axis is not built yet"),
    "axis of zero": wrong("mesh.fsdp=0", "must be at least 1, or -1"),
    "two free axes": wrong("mesh.tensor=-1", "only one axis may be -1"),
    "six heads, tensor 4": wrong("mesh.tensor=4", "must divide model.heads = 6", "values that work: 1, 2"),
    "two key heads, tensor 6": wrong("mesh.tensor=6", "model.kv_heads = 2", "1, 2", also=("model.kv_heads=2",)),
    "mesh larger than devices": wrong(
        "mesh.replica=3", "must divide the 4 devices", "2, 4", also=("cluster.simulate=4",)
    ),
    "mesh smaller than devices": wrong("mesh.fsdp=2", "mesh.fsdp = 4", also=("cluster.simulate=4",)),
    "batch of 10 on 4": wrong(
        "batch.global_size=10", "the 4 data shards; nearest: 8 or 12", also=("cluster.simulate=4",)
    ),
    "fewer rows than devices": wrong("batch.global_size=2", "nearest: 4", also=("cluster.simulate=4",)),
    "8 with microbatch 3": wrong("batch.microbatch=3", "must divide batch.global_size = 8", "2, 4"),
    "microbatch on 4": wrong(
        "batch.microbatch=4", "4 x 4; nearest: 16", "batch.microbatch = 1, 2", also=("cluster.simulate=4",)
    ),
    "batch of evaluation": wrong("evaluate.batch_size=6", "nearest: 4 or 8", also=("cluster.simulate=4",)),
    "process": wrong("cluster.process_id=2", "below cluster.processes = 2; nearest: 1", also=("cluster.processes=2",)),
    "coordinator": wrong("cluster.coordinator=node1", "HOST:PORT"),
    # Data and evaluation.
    "nothing to evaluate": wrong("evaluate.every_steps=5", "[data.validation]"),
    "validation is no table": wrong("data.validation=web", 'data.validation = "web"'),
    "validation is a number": wrong("data.validation.web=3", "data.validation.web = 3: must be a path"),
    "source is a number": wrong("data.validation.all={code=3}", "data.validation.all.code = 3: must be a path"),
    "source without a path": wrong("data.validation.all.code=''", 'data.validation.all.code = "": must be a path'),
    "source with a weight": file(
        '[data.validation.all.code]\npath = "x"\nweight = 2\n', "data.validation.all.code: must be a path"
    ),
    "too deep": wrong("data.validation.all.code.path=x", "data.validation.all.code.path: there is no such key"),
    "no sources": wrong("data.validation={all={}}", "data.validation.all", "a dataset, or paths by name"),
    "ambiguous set": wrong('data.validation={"a/b"="x"}', 'data.validation = "a/b": names have no "/"'),
    "ambiguous source": wrong('data.validation.all={"a/b"="x"}', 'data.validation = "a/b": names have no "/"'),
    "nothing to read": wrong("data.build.on_error=skip", "data.build.files or data.build.corpus"),
    "two corpora": wrong("data.build.corpus=python-stdlib", "only one of", also=('data.build.files=["a.txt"]',)),
    "trained bytes": wrong(
        "data.build.train_vocabulary=400", "tokenizer.json", also=("data.build.corpus=python-stdlib",)
    ),
    "large vocabulary": wrong("data.build.train_vocabulary=501", "at most model.vocabulary_size = 500"),
    "nowhere to hold out": wrong(
        "data.build.validation_share=0.1", "needs a split in", also=("data.build.corpus=python-stdlib",)
    ),
    "no expression": wrong("data.build.keep=f(x)", "is not understood; allowed", also=('data.build.files=["a"]',)),
    "fields of plain text": wrong("data.build.keep=x", "no fields", also=("data.build.corpus=python-stdlib",)),
    "no length left": wrong(
        "data.build.max_characters=5",
        "at least data.build.min_characters = 9",
        also=("data.build.corpus=python-stdlib", "data.build.min_characters=9"),
    ),
    "bytes cannot fill in": wrong(
        "data.build.fill_in_middle.rate=0.5", "have none", also=("data.build.corpus=python-stdlib",)
    ),
    "no partition": wrong("data.build.executor=slurm", "submits to it", also=("data.build.corpus=python-stdlib",)),
    "error handling": wrong("data.build.on_error=skp", "'stop' or 'skip'; nearest: skip"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str, bool]]:
    """Exit code, stdout, stderr and whether jax was imported of every case, all run in one real process."""
    commands = []
    for number, case in enumerate(CASES.values()):
        folder = tmp_path_factory.mktemp(f"case{number}")
        (folder / "base.toml").write_text(BASE)
        file = folder / "base.toml"
        if case.text is not None:
            file = folder / "wrong.toml"
            file.write_text(case.text)
        commands.append(["train", str(file), *case.overrides])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        cwd=REPOSITORY,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, results: dict[str, tuple[int, str, str, bool]]) -> None:
    """Exit code 2, one message that names key, value and what is allowed, and nothing heavy was imported."""
    code, out, error, jax_imported = results[name]
    assert code == 2, error
    for part in CASES[name].says:
        assert part in error
    assert out == "" and "Traceback" not in error
    assert not jax_imported


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The real command, in `folder`."""
    command = [sys.executable, "-m", "jaxscale", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    """Each mistake of a file and of the command line has a line of its own."""
    (tmp_path / "base.toml").write_text(BASE.replace("layers = 2", "layers = 0").replace("[batch]", "[bach]"))
    done = run("train", "base.toml", "optimizer.beta1=2.0", "trian.steps=3", "seed", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert all(line.startswith("jaxscale: ") for line in lines)
    parts = ("base.toml:7: model.layers = 0", "optimizer.beta1 = 2.0", "bach: there is no", "trian.steps", "'seed':")
    for part in parts:
        assert sum(part in line for line in lines) == 1, done.stderr


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    """A config that is not there, or a folder in its place."""
    (tmp_path / "quickstart.toml").write_text(BASE)
    done = run("train", "quickstrat.toml", folder=tmp_path)
    assert done.returncode == 2 and "nearest: quickstart.toml" in done.stderr and "Traceback" not in done.stderr
    assert run("train", ".", folder=tmp_path).returncode == 2


def test_nothing_is_written(tmp_path: Path) -> None:
    """A refusal comes before the run directory is made."""
    (tmp_path / "base.toml").write_text(BASE)
    assert run("train", "base.toml", "mesh.tensor=4", folder=tmp_path).returncode == 2
    assert [file.name for file in tmp_path.iterdir()] == ["base.toml"]


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_no_run_directory(verb: str, tmp_path: Path) -> None:
    """A run that is not there is refused with the nearest one that is."""
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").write_text(BASE)
    done = run(verb, "runs/frist", *(["def "] if verb == "generate" else []), folder=tmp_path)
    assert done.returncode == 2 and "nearest: " in done.stderr and "runs/first" in done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["trian", "x"], ["train"], ["train", "a.toml", "--bogus"], ["data", "show", "a.toml"]]
)
def test_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    """Wrong verbs and options are refused with the same exit code."""
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
