"""The command line: argv -> Config -> one call.

Stage one of the law of refusal happens here, in `load`, before anything heavy is imported: what a verb needs is
imported inside it, so `--help` and refusals are quick and jax has not started.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxscale.config import keys
from jaxscale.config.check import is_port
from jaxscale.config.diff import diff, dotted, json_schema, to_toml
from jaxscale.config.errors import Refused, Stop
from jaxscale.config.load import load, load_data
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config

app = typer.Typer(
    help="Pretrain language models in JAX, from one laptop core to thousands of hosts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Token datasets: make, check and look at them.", no_args_is_help=True)
launch_app = typer.Typer(help="Start a training of several processes.", no_args_is_help=True)
config_app = typer.Typer(help="Look at configs.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(launch_app, name="launch")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, such as configs/quickstart.toml.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, such as runs/quickstart.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values laid over the file, such as train.steps=10."),
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="`bytes` or a tokenizer.json, for token files that have none beside them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; `argv` without the program's name, unset: the process's own.

    A `Stop` becomes its message on stderr and its exit code. Any other exception is a fault of ours and keeps its
    traceback (Python exits with 1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _refuse_dashed_keys(arguments)
        app(args=arguments, prog_name="jaxscale")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except Stop as stop:
        print("\n".join(f"jaxscale: {line}" for line in str(stop).splitlines()), file=sys.stderr)
        return stop.exit_code
    return 0


def _refuse_dashed_keys(arguments: Sequence[str]) -> None:
    """Whoever writes a config key like an option is told how it is written here."""
    for argument in arguments:
        option, _, value = argument.lstrip("-").partition("=")
        spellings = (option, option.replace("-", "_"), option.replace("-", ".", 1).replace("-", "_"))
        fields = {key: field for key in spellings if (field := keys.find(key.split(".")))}
        key = next((key for key, field in fields.items() if not keys.sections_of(field)), None)
        if argument.startswith("-") and key:
            raise Refused(f"{argument}: a config key has no dashes; nearest: {key}={value or 'VALUE'}")


def _load_run(run: Path, overrides: Sequence[str] | None) -> Config:
    """The config that a run directory holds, with `run_dir` where the directory is now."""
    run = Path(os.path.abspath(run.expanduser()))
    if not (run / "config.toml").is_file():
        runs = [folder.parent.name for folder in run.parent.glob("*/config.toml")]
        near = difflib.get_close_matches(run.name, runs, n=1) or runs[:1]
        hint = f"; nearest: {run.parent / near[0]}" if near else ""
        raise Refused(f"{run}: is no run directory: it holds no config.toml{hint}")
    return load(run / "config.toml", [*(overrides or ()), f"runs_dir={run.parent}", f"name={run.name}"])


def _facts_text(facts: Mapping[str, Any], prefix: str = "") -> str:
    """Facts of any depth, a line each, for people."""
    flat = dotted(facts)
    width = max(map(len, flat), default=0)
    shown = {name: f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else v for name, v in flat.items()}
    return "\n".join(f"{prefix}{name:{width}}  {value}" for name, value in shown.items())


def _print(facts: Any, text: str, as_json: bool) -> None:
    """Facts as JSON for programs, or as text for people."""
    print(json.dumps(facts, indent=2, default=str) if as_json else text)


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train a model; a run directory that holds a checkpoint is resumed."""
    loaded = load(config, overrides or ())
    from jaxscale.train.run import train as run

    run(loaded)


@app.command("eval")
def evaluate(run: RunFolder, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Evaluate a run's last checkpoint on its validation splits: loss, perplexity, bits per byte."""
    loaded = _load_run(run, overrides)
    from jaxscale.train.run import evaluate as run_evaluation

    facts = run_evaluation(loaded)
    _print(facts, _facts_text(facts), as_json)


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    overrides: Overrides = None,
) -> None:
    """Continue a text with a run's last checkpoint; `sample.*` keys set length, temperature and top-p."""
    loaded = _load_run(run, overrides)
    from jaxscale.train.run import generate as run_generation

    print(run_generation(loaded, prompt))


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; with --check the directory of a run.")],
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="GPU:HOSTSxGPUS", help="What to compile for, such as h100-sxm:64x8.")
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="A TOML file with GPUs and clusters of your own.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a GPU-hour.")] = None,
    failures: Annotated[float | None, typer.Option(min=0, help="That end a run, for each GPU and day.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="A file for one step: .png, .html or .json (Perfetto).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold a finished run, CONFIG, against its plan.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile the training step for GPUs that are not there: memory, communication, time, money, advice.

    Without --cluster it is compiled for the devices that the config simulates, and says memory and collectives only.
    """
    loaded = _load_run(config, overrides) if check else load(config, overrides or ())
    from jaxscale.plan.check import check as check_run
    from jaxscale.plan.page import page
    from jaxscale.plan.plan import plan as make_plan
    from jaxscale.plan.plan import plan_here

    if cluster is None:
        facts, spans = plan_here(loaded)
    else:
        from jaxscale.hardware import hardware as read_hardware

        facts, spans = make_plan(loaded, read_hardware(hardware).cluster(cluster), price, failures)
    if check:
        facts["check"] = check_run(loaded.run_dir, facts)
    if timeline is not None:
        from jaxscale.report.timeline import write_timeline

        write_timeline(timeline, spans)
    _print(facts, page(facts), as_json)


@data_app.command()
def tokenizer(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train the tokenizer that data.build describes, on its corpus; one that exists is left alone."""
    settings = load_data(config, overrides or ()).build
    if settings is None:
        raise Refused(f"{config}: data.build: is missing; it says which text and which tokenizer to use")
    from jaxscale.data.build.prepare import prepare_tokenizer
    from jaxscale.data.progress import shown_on_stderr

    with shown_on_stderr() as progress:
        made = prepare_tokenizer(settings, progress)
    print(f"{settings.tokenizer}: {made.vocabulary_size:,} ids, fingerprint {made.fingerprint}")


@data_app.command("build")
def data_build(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Build the token dataset that data.build describes; one that is there already is left alone."""
    data = load_data(config, overrides or ())
    from jaxscale.data.build.prepare import build
    from jaxscale.data.build.report import text
    from jaxscale.data.progress import shown_on_stderr

    with shown_on_stderr() as progress:
        report = build(data, progress)
    _print(asdict(report), text(report), as_json)


@data_app.command("inspect")
def data_inspect(
    path: Annotated[Path, typer.Argument(metavar="DATASET", help="A token dataset, or token files of other programs.")],
    tokenizer: TokenizerOption = None,
    as_json: AsJson = False,
) -> None:
    """Facts of a token dataset; token files of other programs are recognised, and read once."""
    from jaxscale.data.describe import inspect, inspect_text
    from jaxscale.data.progress import shown_on_stderr

    with shown_on_stderr() as progress:
        facts = inspect(path, tokenizer, progress)
    _print(facts, inspect_text(facts), as_json)


@data_app.command("verify")
def data_verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Datasets, or configs: all that they name.")],
    tokenizer: TokenizerOption = None,
    as_json: AsJson = False,
) -> None:
    """Read datasets from end to end: checksums, ids, where documents end."""
    datasets = []
    for path in paths:
        data = load_data(path) if path.suffix == ".toml" else None
        named = data.datasets if data else [path]
        datasets += [(name, (data and data.tokenizer) or tokenizer) for name in named]
    from jaxscale.data.progress import shown_on_stderr
    from jaxscale.data.verify import verified_text, verify_all

    with shown_on_stderr() as progress:
        found, wrong = verify_all(datasets, progress)
    if found:
        _print([asdict(one) for one in found], verified_text(found), as_json)
    if wrong:
        raise Refused("\n".join(wrong))


@data_app.command("stage")
def data_stage(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A token dataset, or token files of other programs.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A folder for copies, on a disk of this machine.")],
    limit_gb: Annotated[
        float | None,
        typer.Option(min=0, help="What the copies in DST may take together; for it, those not in use are removed."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Files that are copied at one time.")] = 4,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="NAME[:PORT],...", help="All hosts that stage it now; only the first reads SRC for them."),
    ] = None,
    host_index: Annotated[int, typer.Option(min=0, help="Which of the hosts this one is, from 0.")] = 0,
    tokenizer: TokenizerOption = None,
    as_json: AsJson = False,
) -> None:
    """Copy a token dataset to a disk of this machine, verified; prints the copy's folder. One that is there is kept."""
    from jaxscale.data.progress import shown_on_stderr
    from jaxscale.data.relay import ALONE, Tree
    from jaxscale.data.stage import stage

    tree = Tree(hosts.split(","), host_index) if hosts else ALONE
    for host in tree.hosts:
        if ":" in host and not is_port(host.partition(":")[2]):
            raise Refused(f"--hosts: {host}: must be NAME or NAME:PORT, with a port from 1 to 65535")
    if host_index >= len(tree.hosts):
        raise Refused(
            f"--host-index {host_index}: --hosts names {len(tree.hosts)}; the last one is {len(tree.hosts) - 1}"
        )
    limit = None if limit_gb is None else round(limit_gb * 1e9)
    with shown_on_stderr() as progress:
        folder = stage(
            source,
            destination,
            limit_bytes=limit,
            streams=streams,
            tokenizer=tokenizer,
            tree=tree,
            progress=progress,
        )
    _print({"folder": str(folder)}, str(folder), as_json)


@data_app.command("bench")
def data_bench(
    config: ConfigFile,
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for each setting.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine feeds a run, by several settings, and how many GPUs that keeps busy."""
    loaded = load(config, overrides or ())
    from jaxscale.train.bench import bench, bench_text

    facts = bench(loaded, seconds)
    _print(facts, bench_text(facts), as_json)


@data_app.command("show")
def data_show(
    config: ConfigFile,
    step: Annotated[int, typer.Option(help="The update, as in metrics.jsonl; 1 is the first.")],
    row: Annotated[int | None, typer.Option(help="One row of its batch, from 0; unset: all rows.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The decoded text of exactly the batch that an update sees."""
    loaded = load(config, overrides or ())
    from jaxscale.data.describe import show_rows, show_text
    from jaxscale.data.mixture import make_order, open_mixture

    mixture, phases = open_mixture(loaded.data), phases_of(loaded)
    if (loaded.run_dir / "checkpoints").is_dir():  # a run that was resumed may have gone through others
        from jaxscale.train.resume import newest, phases_from

        phases = phases_from(newest(loaded.run_dir), loaded)
    order = make_order(loaded, mixture, phases)
    facts = show_rows(mixture, order, step, row)
    _print(facts, show_text(facts), as_json)


@launch_app.command("local")
def launch_local(
    config: ConfigFile,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes on this machine.")],
    overrides: Overrides = None,
) -> None:
    """Train with several processes on this machine, their logs told apart; if one dies, all end."""
    loaded = load(config, [*(overrides or ()), f"cluster.processes={processes}"])
    from jaxscale.launch.local import run

    raise typer.Exit(run(config, overrides or (), processes, loaded.run_dir / "logs"))


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """The resolved config, with what follows from it: parameters, tokens an update, FLOPs a token."""
    loaded = load(config, overrides or ())
    from jaxscale.train.run import describe

    facts = describe(loaded)
    everything = {"config": loaded.model_dump(mode="json"), "derived": facts}
    _print(everything, f"{to_toml(loaded)}\n# What follows from it\n{_facts_text(facts, '# ')}", as_json)


@config_app.command("diff")
def config_diff(
    old: Annotated[Path, typer.Argument(metavar="A", help="A TOML file.")],
    new: Annotated[Path, typer.Argument(metavar="B", help="A TOML file.")],
    as_json: AsJson = False,
) -> None:
    """The keys in which two configs differ, resolved."""
    changes = diff(load(old), load(new))
    width = max((len(change.key) for change in changes), default=0)
    lines = [f"{c.key:{width}}  {json.dumps(c.old)} -> {json.dumps(c.new)}" for c in changes]
    _print([asdict(change) for change in changes], "\n".join(lines) or "no difference", as_json)


@config_app.command("schema")
def config_schema() -> None:
    """JSON Schema of the TOML files, for editors."""
    print(json.dumps(json_schema(), indent=2))
