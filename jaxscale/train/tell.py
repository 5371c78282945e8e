"""What `train` tells a person before and after the loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxscale.cluster.distributed import Processes
from jaxscale.config.diff import Change
from jaxscale.config.errors import Refused
from jaxscale.config.length import train_length
from jaxscale.config.schema import Config
from jaxscale.data.store import TokenDataset
from jaxscale.data.unigram import unigram_loss
from jaxscale.flops import parameter_count
from jaxscale.report.page import write_report
from jaxscale.runtime.metrics import read
from jaxscale.train.build import Run


def introduction(
    run: Run, dataset: TokenDataset, processes: Processes, first: int, changes: Sequence[Change], console: Console
) -> None:
    """Where the run is, what it trains on what, and what changed since its checkpoint."""
    config, steps = run.config, run.lengths.steps
    tokens = config.batch.global_size * config.data.sequence_length
    axes = " x ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items() if size > 1) or "one device"
    device = run.mesh.devices.flat[0]
    console.print(f"run         {config.run_dir}")
    console.print(f"model       {parameter_count(config.model):,} parameters, computed in {run.precision.compute.name}")
    console.print(f"data        {config.data.train}: {dataset.tokens:,} tokens in {dataset.documents:,} documents")
    console.print(f"devices     {run.mesh.devices.size} x {device.device_kind}: {axes}")
    console.print(f"length      {steps:,} updates of {tokens:,} tokens{_rounded(config, steps * tokens)}")
    if processes.count > 1:
        table = Table("process", "host", "devices", box=None)
        for index, member in enumerate(processes.members):
            table.add_row(str(index), member.host, str(member.devices))
        console.print(table)
    if first:
        console.print(f"resuming    after step {first:,}")
    for change in changes:
        console.print(f"changed     {change.key}: {change.old} -> {change.new}")


def finished(config: Config, done: int, steps: int, console: Console) -> None:
    """Nothing is left to do. Raises Refused if the run is longer than the config asks for."""
    if done > steps:
        raise Refused(
            f"{config.run_dir} is trained to step {done:,}, the config asks for {steps:,} updates; "
            f"nearest: train.steps={done}, or another name"
        )
    console.print(f"{config.run_dir} is finished: {done:,} updates. A larger train.steps continues it.")


def conclusion(
    config: Config,
    dataset: TokenDataset,
    validation: Mapping[str, TokenDataset],
    completion: str | None,
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
        unigram = unigram_loss(dataset, data) if config.objective.kind == "causal" else None
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
    console.print(f"  go on            the same command with train.steps={2 * lines[-1]['step']}")
    if config.model.causal:
        console.print(f"  complete a text  jaxscale generate {shown} 'import '")
    console.print(f"  evaluate         jaxscale eval {shown}")
    console.print("  change a value   the same command with optimizer.learning_rate=1e-3 name=another")


def _rounded(config: Config, tokens: int) -> str:
    length = train_length(config)
    return "" if length.unit == "steps" else f" ({float(length.value):g} {length.unit}, rounded up: {tokens:,} tokens)"


def _relative(path: Path) -> Path:
    """The path as a person in the working directory would type it."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
