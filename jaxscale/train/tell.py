"""What `train` tells a person before and after the loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxscale.cluster.distributed import Processes
from jaxscale.config.diff import Change
from jaxscale.config.errors import Refused
from jaxscale.config.length import train_length
from jaxscale.config.phases import Phase, step_at_cursor, tokens_at_step
from jaxscale.config.schema import Config
from jaxscale.data.interleave import draws_of
from jaxscale.data.mixture import Mixture, shares
from jaxscale.data.unigram import unigram_loss
from jaxscale.flops import parameter_count
from jaxscale.report.page import write_report
from jaxscale.runtime.metrics import read
from jaxscale.train.build import Run


def introduction(
    run: Run,
    mixture: Mixture,
    processes: Processes,
    first: int,
    changes: Sequence[Change],
    exhausted: str | None,
    console: Console,
) -> None:
    """Where the run is, what it trains on what, and what changed since its checkpoint."""
    config, steps, phases = run.config, run.timeline.steps, run.timeline.phases
    axes = " x ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items() if size > 1) or "one device"
    device = run.mesh.devices.flat[0]
    console.print(f"run         {config.run_dir}")
    console.print(f"model       {parameter_count(config.model):,} parameters, computed in {run.precision.compute.name}")
    for dataset in mixture.datasets.values():
        console.print(f"data        {dataset.path}: {dataset.tokens:,} tokens in {dataset.documents:,} documents")
    if config.data.packing != "end_to_end":
        shares_of = {length: mixture.padding_share(length) for length in {phase.sequence_length for phase in phases}}
        padding = ", ".join(f"{share:.3%} padding at {length:,} tokens" for length, share in sorted(shares_of.items()))
        console.print(f"packing     {config.data.packing}: {padding}")
    console.print(f"devices     {run.mesh.devices.size} x {device.device_kind}: {axes}")
    console.print(f"length      {_length(run)}{_rounded(config, tokens_at_step(phases, steps))}")
    if len(phases) > 1 or len(mixture.datasets) > 1:
        for phase in phases:
            console.print(f"phase       {_phase(config, phase, step_at_cursor(phases, phase.first_cursor))}")
    if exhausted:
        console.print(f"data end    {exhausted}")
    if processes.count > 1:
        table = Table("process", "host", "devices", box=None)
        for index, member in enumerate(processes.members):
            table.add_row(str(index), member.host, str(member.devices))
        console.print(table)
    if first:
        console.print(f"resuming    after step {first:,}")
    for change in changes:
        console.print(f"changed     {change.key}: {change.old} -> {change.new}")


def finished(config: Config, done: int, steps: int, changes: Sequence[Change], console: Console) -> None:
    """Nothing is left to do. Raises Refused if the run is longer than the config asks for."""
    if done > steps:
        raise Refused(
            f"{config.run_dir} is trained to step {done:,}, the config asks for {steps:,} updates; "
            f"nearest: train.steps={done}, or another name"
        )
    for change in changes:
        console.print(f"not applied {change.key}: {change.old} -> {change.new}")
    console.print(f"{config.run_dir} is finished: {done:,} updates. A larger train.steps continues it.")


def warn(processes: Processes, text: str) -> None:
    """A line on stderr, from whichever process."""
    who = f"process {processes.index}: " if processes.count > 1 else ""
    print(f"jaxscale: {who}{text}", file=sys.stderr, flush=True)


def advice_on_waiting(config: Config) -> str:
    """What to change where a run waits for data."""
    if config.data.workers == "auto":
        return "the storage does not deliver more; copy the data to a local disk first (jaxscale data stage)"
    data = config.data
    return (
        f"data.workers = {data.workers}, data.read_threads = {data.read_threads}, data.read_ahead = {data.read_ahead}; "
        '`jaxscale data bench` finds better ones, or data.workers="auto"'
    )


def exhausted(config: Config, source: str, last: int, steps: int) -> str:
    """That the data ends before the run, and what to do."""
    limit = config.data.sources[source].max_epochs
    return (
        f"{source} has had its max_epochs = {limit:g} after step {last:,} of {steps:,}, and the data ends there (exit "
        "code 4). To go on: a larger one or data.when_exhausted=renormalize, with data.accept_change=true if the run "
        "has begun"
    )


def conclusion(
    config: Config,
    mixture: Mixture,
    validation: Mapping[str, Mixture],
    completion: str | None,
    exhausted: str | None,
    console: Console,
) -> None:
    """The result, where everything is, and what to try next."""
    lines = read(config.run_dir / "metrics.jsonl")
    baselines = {}
    console.print()
    for split, data in validation.items():
        last = [line for line in lines if line.get("split") == split][-1]
        text = f"{split} loss {last['loss']:.3f} nats a token (perplexity {last['perplexity']:.1f})"
        if last["bits_per_byte"] is not None:
            text += f", {last['bits_per_byte']:.3f} bits a byte"
        alone = len(data.datasets) == 1 and config.objective.kind == "causal"
        unigram = unigram_loss(mixture.datasets.values(), data.first) if alone else None
        if unigram is not None:
            baselines[f"unigram model, {split}"] = unigram
            text += f"; a unigram model has {unigram:.3f} ({math.exp(unigram):.1f})"
        console.print(text)
    if completion is not None:
        console.print("\nA completion:\n")
        console.print(completion, markup=False, style="cyan")
    report = write_report(config.run_dir, baselines)
    shown = _relative(config.run_dir)
    console.print(f"\nreport      {_relative(report)} and {shown / 'loss.png'}")
    console.print(f"checkpoints {shown / 'checkpoints'}")
    console.print("\nWhat to try next:", style="bold")
    if exhausted is None:
        console.print(f"  go on            the same command with train.steps={2 * lines[-1]['step']}")
    if config.model.causal:
        console.print(f"  complete a text  jaxscale generate {shown} 'import '")
    console.print(f"  evaluate         jaxscale eval {shown}")
    console.print("  change a value   the same command with optimizer.learning_rate=1e-3 name=another")


def _length(run: Run) -> str:
    phases, steps = run.timeline.phases, run.timeline.steps
    if len({(phase.global_batch, phase.sequence_length) for phase in phases}) > 1:
        return f"{steps:,} updates"
    return f"{steps:,} updates of {phases[0].global_batch * phases[0].sequence_length:,} tokens"


def _phase(config: Config, phase: Phase, step: int) -> str:
    """A phase in a line; the shares of the sources are those that are used, which may be rounded."""
    drawn = ", ".join(f"{name} {share:.3%}" for name, share in shares(config, phase).items())
    period = f" (draws of {sum(draws_of(phase.weights)):,})" if len(phase.weights) > 1 else ""
    return f"from step {step + 1:,}: {phase.global_batch:,} x {phase.sequence_length:,} tokens; {drawn}{period}"


def _rounded(config: Config, tokens: int) -> str:
    length = train_length(config)
    return "" if length.unit == "steps" else f" ({float(length.value):g} {length.unit}, rounded up: {tokens:,} tokens)"


def _relative(path: Path) -> Path:
    """The path as a person in the working directory would type it."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
