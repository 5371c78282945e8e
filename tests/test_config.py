"""Configs: extends, overrides, comparison, schema, the shipped files, and arithmetic on lengths and meshes."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from jaxscale.config.devices import closest_multiples, divisors, microsteps, resolve_mesh
from jaxscale.config.diff import Change, diff, fingerprint, json_schema, to_toml
from jaxscale.config.errors import Refused
from jaxscale.config.keys import all_keys, nearest
from jaxscale.config.length import Length, parse_length
from jaxscale.config.load import load, load_data
from jaxscale.config.phases import Phase, lengths_of, phases_of
from jaxscale.config.schema import MeshConfig
from jaxscale.flops import parameter_count

CONFIGS = Path(__file__).parent.parent / "configs"
DECODER = CONFIGS / "tiny" / "decoder.toml"

PARAMETERS = {
    "llama3/8b": 8_030_261_248,
    "llama3/70b": 70_553_706_496,
    "llama3/405b": 405_853_388_800,
    "llama2/7b": 6_738_415_616,
    "qwen3/0.6b": 596_049_920,
    "qwen3/8b": 8_190_735_360,
    "gpt2/124m": 124_439_808,
    "bert/base": 109_514_298,
    "study/bert-120m": 109_514_298,
    "study/bert-350m": 335_174_458,
}


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.toml")), ids=lambda file: str(file.relative_to(CONFIGS)))
def test_shipped_configs(file: Path, tmp_path: Path) -> None:
    """Every shipped config loads, has the published number of parameters, and survives being written and read."""
    config = load(file)
    name = str(file.relative_to(CONFIGS).with_suffix(""))
    if name not in ("quickstart", "tiny/decoder", "tiny/encoder"):
        assert parameter_count(config.model) == PARAMETERS[name]
    copy = tmp_path / "config.toml"
    copy.write_text(to_toml(config))
    assert load(copy) == config
    assert fingerprint(load(copy)) == fingerprint(config)


def test_extends_merges_tables(tmp_path: Path) -> None:
    """The file wins over what it extends, a later base over an earlier one, and tables are merged key by key."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.toml").write_text(f'extends = "{DECODER}"\nseed = 1\n[optimizer]\nbeta1 = 0.5\nbeta2 = 0.5')
    (tmp_path / "two.toml").write_text("[optimizer]\nbeta2 = 0.6\nepsilon = 1e-6")
    (tmp_path / "deep" / "top.toml").write_text('extends = ["../one.toml", "../two.toml"]\n[optimizer]\nepsilon = 1e-7')
    config = load(tmp_path / "deep" / "top.toml")
    assert (config.seed, config.optimizer.beta1, config.optimizer.beta2, config.optimizer.epsilon) == (
        1,
        0.5,
        0.6,
        1e-7,
    )
    assert config.model == load(DECODER).model


def test_extends_in_a_circle(tmp_path: Path) -> None:
    """Files that extend each other are refused; one base reached twice is not a circle."""
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(Refused, match="closes a circle"):
        load(tmp_path / "a.toml")
    (tmp_path / "left.toml").write_text(f'extends = "{DECODER}"\nseed = 3')
    (tmp_path / "right.toml").write_text(f'extends = "{DECODER}"')
    (tmp_path / "both.toml").write_text('extends = ["right.toml", "left.toml"]')
    assert load(tmp_path / "both.toml").seed == 3


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1_0e-5"])
def test_floats_from_file_and_command_line(text: str, tmp_path: Path) -> None:
    """Every way to write a number means the same in a file and on the command line."""
    file = tmp_path / "a.toml"
    file.write_text(f'extends = "{DECODER}"\n[optimizer]\nlearning_rate = {text}')
    assert (
        load(file).optimizer.learning_rate == load(DECODER, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate
    )
    assert load(file).optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("text", ["10000", "1e4", "10_000", "1.0e4"])
def test_integers_from_file_and_command_line(text: str, tmp_path: Path) -> None:
    """A whole number may be written as a float where an integer is asked for."""
    file = tmp_path / "a.toml"
    file.write_text(f'extends = "{DECODER}"\n[train]\nsteps = {text}\n[schedule]\nwarmup = {text}')
    for config in (load(file), load(DECODER, [f"train.steps={text}", f"schedule.warmup={text}"])):
        assert (config.train.steps, config.schedule.warmup) == (10_000, 10_000)
        assert type(config.train.steps) is int and type(config.schedule.warmup) is int


def test_zero_and_false_are_values() -> None:
    """0 and false are not taken for missing."""
    config = load(
        DECODER, ["optimizer.weight_decay=0", "data.shuffle=false", "sample.temperature=0", "schedule.warmup=0"]
    )
    assert (config.optimizer.weight_decay, config.data.shuffle, config.sample.temperature) == (0, False, 0)
    assert config.schedule.warmup == 0


def test_text_overrides() -> None:
    """Text needs no quotes, keeps its blanks, and stays text where only text is asked for."""
    config = load(
        DECODER, ["sample.prompt=def ", "name=2024-01-01", 'data.build.files=["a.txt"]', "data.build.corpus=none"]
    )
    assert (config.sample.prompt, config.name) == ("def ", "2024-01-01")
    assert load(DECODER, ['sample.prompt="quoted # text"']).sample.prompt == "quoted # text"
    assert load(DECODER, ["sample.prompt=7"]).sample.prompt == "7"


def test_later_override_wins() -> None:
    """As in a shell, the last word counts."""
    assert load(DECODER, ["seed=1", "seed=2"]).seed == 2


def test_none_unsets(tmp_path: Path) -> None:
    """ "none" unsets an optional key, a section and an entry, in files and overrides; elsewhere it is a word."""
    config = load(DECODER, ["optimizer.clip_norm=none", "model.kv_heads=none", "cluster.compilation_cache=none"])
    assert (config.optimizer.clip_norm, config.model.kv_heads, config.cluster.compilation_cache) == (None, None, None)
    assert load(DECODER, ["model.remat=none"]).model.remat == "none"
    file = tmp_path / "a.toml"
    file.write_text(f'extends = "{DECODER}"\n[data]\nbuild = "none"\n[data.validation]\nvalidation = "none"\n')
    assert load(file).data.build is None and load(file).data.validation == {}
    sets = ['data.validation.all={code="/code", books="/books"}', "data.validation.all.books=none"]
    assert load(DECODER, sets).data.validation["all"] == {"code": Path("/code")}
    (tmp_path / "b.toml").write_text(to_toml(config))
    assert load(tmp_path / "b.toml") == config


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are resolved once, against the working directory, with ~ and variables expanded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", "/scratch")
    overrides = [
        "data.train=$SCRATCH/x/",
        "runs_dir=~/runs",
        "data.validation.validation=./v",
        'data.build.files=["t/*.txt"]',
    ]
    config = load(DECODER, [*overrides, "data.build.corpus=none", "data.build.tokenizer=t.json"])
    assert config.data.train == Path("/scratch/x")
    assert config.run_dir == tmp_path / "home" / "runs" / "tiny-decoder"
    assert config.data.validation["validation"] == tmp_path / "v"
    assert config.data.build is not None
    assert config.data.build.files == (str(tmp_path / "t" / "*.txt"),)
    assert config.data.build.tokenizer == str(tmp_path / "t.json")
    assert config.cluster.compilation_cache == tmp_path / "home" / ".cache" / "jaxscale" / "compiled"
    assert load(DECODER).runs_dir == tmp_path / "runs"
    assert load(DECODER, ["data.build.tokenizer=bytes"]).data.build.tokenizer == "bytes"


def test_load_data_takes_partial_files(tmp_path: Path) -> None:
    """`data build` needs [data] only, and is as strict about it and about what else is there."""
    file = tmp_path / "a.toml"
    file.write_text('[data]\ntrain = "t"\n[data.build]\ncorpus = "python-stdlib"')
    assert load_data(file, ["data.sequence_length=8"]).sequence_length == 8
    assert load_data(DECODER) == load(DECODER).data
    with pytest.raises(Refused, match=r"data.build.validation_share = 0.5: needs a split in"):
        load_data(file, ["data.build.validation_share=0.5"])
    with pytest.raises(Refused, match=r"optimizer.beta1 = 3"):
        load_data(file, ["optimizer.beta1=3"])
    file.write_text('name = "a"')
    with pytest.raises(Refused, match=r"data: is missing"):
        load_data(file)


def test_diff_and_fingerprint() -> None:
    """A diff names exactly the keys that differ; the fingerprint changes with each."""
    old = load(DECODER, ["data.build=none"])
    new = load(DECODER, ["data.build=none", "seed=1", "data.validation.more=/x", "optimizer.clip_norm=none"])
    assert diff(old, old) == []
    assert diff(old, new) == [
        Change("seed", 0, 1),
        Change("optimizer.clip_norm", 1.0, None),
        Change("data.validation.more", None, "/x"),
    ]
    assert fingerprint(old) == fingerprint(load(DECODER, ["data.build=none"])) != fingerprint(new)


def test_schema_describes_files() -> None:
    """The JSON Schema knows `extends`, requires nothing, and describes every knob."""
    schema = json_schema()
    assert "extends" in schema["properties"] and "required" not in json.dumps(schema["properties"])
    for section in schema["$defs"].values():
        assert "required" not in section
        for name, field in section["properties"].items():
            assert "description" in field or "$ref" in field or "const" in field or name == "kind", name
    model = schema["$defs"]["ModelConfig"]["properties"]
    assert model["layers"]["minimum"] == 1
    assert {"const": "none"} in model["kv_heads"]["anyOf"]


def test_nearest_finds_each_key() -> None:
    """A key with a letter missing leads back to itself."""
    for key in all_keys():
        name = key.rpartition(".")[2]
        if len(name) > 6:
            assert key in nearest(key.replace(name, name[:-2] + name[-1])), key


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (100, Length(Fraction(100), "steps")),
        (0, Length(Fraction(0), "steps")),
        ("100", None),
        ("100 steps", Length(Fraction(100), "steps")),
        ("1 step", Length(Fraction(1), "steps")),
        ("10M tokens", Length(Fraction(10**7), "tokens")),
        ("1.5B tokens", Length(Fraction(15 * 10**8), "tokens")),
        ("1_000k tokens", Length(Fraction(10**6), "tokens")),
        ("0.1 epochs", Length(Fraction(1, 10), "epochs")),
        ("1.5 steps", None),
        ("-1 steps", None),
        ("10 lightyears", None),
    ],
)
def test_lengths(text: int | str, length: Length | None) -> None:
    """Lengths are read exactly or refused."""
    if length is None:
        with pytest.raises(ValueError, match="must be"):
            parse_length(text)
    else:
        assert parse_length(text) == length


def test_lengths_in_steps() -> None:
    """Rounded up to whole updates, exactly: a tenth of 30 rows is 3."""

    def steps(rows: int | None, *overrides: str) -> int | None:
        config = load(DECODER, ["train.steps=none", "schedule.warmup=0", "data.sequence_length=10", *overrides])
        return lengths_of(config, phases_of(config), rows).steps

    assert steps(None, "train.tokens=1001", "batch.global_size=10") == 11
    assert steps(None, "train.epochs=0.5") is None
    assert steps(30, "train.epochs=0.1", "batch.global_size=3") == 1


def test_resolve_mesh() -> None:
    """-1 is what is left; what does not come out even is refused with numbers that do."""
    sizes = resolve_mesh(MeshConfig(tensor=2), 8)
    assert (sizes["fsdp"], sizes["tensor"], sizes["replica"]) == (4, 2, 1)
    with pytest.raises(Refused, match=r"mesh.tensor = 3: tensor 3 = 3 must divide the 8 devices; nearest: 1, 2, 4, 8"):
        resolve_mesh(MeshConfig(tensor=3), 8)
    with pytest.raises(Refused, match=r"nearest: mesh.fsdp = 4"):
        resolve_mesh(MeshConfig(replica=2, fsdp=2), 8)


def test_microsteps() -> None:
    """global_size = microbatch x microsteps x shards, or refused with the nearest that is."""
    assert microsteps(Phase(0, 24, 8, microbatch=3), 4) == 2
    assert microsteps(Phase(0, 24, 8), 4) == 1
    with pytest.raises(Refused, match="nearest: 8 or 12"):
        microsteps(Phase(0, 10, 8), 4)
    with pytest.raises(Refused, match=r"nearest: 24, or batch.microbatch = 1, 2, 4"):
        microsteps(Phase(0, 16, 8, microbatch=6), 4)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert closest_multiples(3, 4) == "4"
