"""The verbs that touch a run: train, eval, generate, and what `config show` derives.

`train` reads as the life of a run: refuse what cannot be right, join the other processes, find the data, build,
compile, restore or initialise, loop, finish.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
from rich.console import Console

from jaxscale.cluster import distributed
from jaxscale.cluster.distributed import Processes
from jaxscale.config.diff import to_toml
from jaxscale.config.errors import DataExhausted, Fault, Refused, Stop, StoppedEarly
from jaxscale.config.length import train_length
from jaxscale.config.phases import lengths_of, phases_of, step_at_cursor, tokens_at_step, updates_of_phases
from jaxscale.config.schema import Config
from jaxscale.data.feed import Feed
from jaxscale.data.files import claim, replace_file
from jaxscale.data.mixture import Mixture, make_order, open_mixture, shares
from jaxscale.data.store import TokenDataset
from jaxscale.flops import flops_per_token, parameter_count
from jaxscale.hardware import peak_flops
from jaxscale.runtime.checkpoint import Checkpoints
from jaxscale.runtime.guard import StopSignal, Watchdog
from jaxscale.runtime.ledger import Ledger
from jaxscale.runtime.metrics import MetricsFile
from jaxscale.runtime.progress import ProgressBar
from jaxscale.train import tell
from jaxscale.train.bench import choose_reading
from jaxscale.train.build import Run, Steps, build, compile_steps, make_timeline
from jaxscale.train.evaluate import evaluate_splits
from jaxscale.train.hooks import (
    CheckpointHook,
    DataWaitHook,
    EvaluationHook,
    FiniteGuard,
    MetricsHook,
    ProfileHook,
    Sink,
    WatchdogHook,
    every,
)
from jaxscale.train.inputs import open_datasets
from jaxscale.train.loop import Hook, run_loop
from jaxscale.train.resume import check_resume, check_skips, metadata, newest, phases_from
from jaxscale.train.sample import complete
from jaxscale.train.state import ModelArrays, model_of


def train(config: Config) -> None:
    """Trains until the last step; a run directory that holds a checkpoint is resumed, a finished one left as it is.

    Raises:
        Refused, Fault, StoppedByGuard, StoppedEarly: see `config/errors.py`.
    """
    ledger = Ledger()
    with joined(config) as processes, StopSignal() as stop, ExitStack() as stack:
        console = Console(quiet=not processes.first, highlight=False, markup=False, soft_wrap=True)
        if processes.first:
            claim_run(config, stack)
        saved = newest(config.run_dir)
        with ledger.phase("prepare data"):
            mixture, validation = open_datasets(config, console, processes)
            changes = check_resume(saved, config, mixture) if saved else ()
            phases = phases_from(saved, config)
            order = make_order(config, mixture, phases)
            if saved is not None:
                check_skips(saved, order)
        timeline = make_timeline(config, phases, mixture.rows(config.data.sequence_length))
        last = timeline.steps if order.steps is None else min(timeline.steps, order.steps)
        limited = None if order.ended_by is None else list(mixture.datasets)[order.ended_by]
        exhausted = tell.exhausted(config, limited, last, timeline.steps) if limited and last < timeline.steps else None
        if exhausted and (saved.step if saved else 0) >= last:
            raise DataExhausted(exhausted)
        if saved is not None and saved.step >= last:
            tell.finished(config, saved.step, last, changes, console)
            return
        run = build(config, jax.devices(), timeline, mixture.first.mask_id)

        checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep)
        if saved is not None:
            checkpoints.check_arrays(saved.step, run.state)
        checkpoints.prepare()
        if processes.first:
            ledger.keep(config.run_dir / "ledger.jsonl")
            stack.callback(ledger.close)
            replace_file(config.run_dir / "config.toml", to_toml(config).encode())
        first = saved.step if saved else 0
        tell.introduction(run, mixture, processes, first, changes, exhausted, console)

        with ledger.phase("compile"):
            steps = compile_steps(run, evaluates=bool(validation), initializes=saved is None, first=first)
        with ledger.phase("restore" if saved else "initialize"):
            state = checkpoints.restore(first, run.state) if saved else steps.initialize()

        about = metadata(config, mixture, phases)
        sinks = make_sinks(run, processes, console, stack, first, last)
        hooks = make_hooks(run, steps, validation, sinks, checkpoints, about, first, last)
        hooks.append(DataWaitHook(partial(tell.warn, processes), tell.advice_on_waiting(config)))
        with ledger.phase("prepare data"):
            reading = choose_reading(config, run, mixture, order)
        feed = Feed(
            mixture,
            order,
            run.batch,
            reading,
            first_step=first,
            last_step=last,
            digests=config.metrics.batch_digest,
        )
        stack.callback(feed.close)
        for hook in hooks:
            stack.callback(hook.close)
        with ledger.phase("train"):
            state, step = run_loop(state, steps.train, feed, first, last, hooks, stop.agreed, ledger.phase)
        with ledger.phase("checkpoint"):
            checkpoints.save(step, state, about)
            checkpoints.close()
        if step < last:
            raise StoppedEarly(
                f"stopped after step {step:,} of {last:,} with a complete checkpoint; the same command goes on"
            )
        prompt = config.sample.prompt
        with ledger.phase("sample"):
            completion = None if prompt is None else complete(run, model_of(state), mixture.first, prompt)
        for sink in sinks:
            sink.close()
        if processes.first:
            with ledger.phase("report"):
                tell.conclusion(config, mixture, validation, completion, exhausted, console)
        if exhausted:
            raise DataExhausted(exhausted)


def evaluate(config: Config) -> dict[str, dict[str, Any]]:
    """The losses of a run's newest checkpoint on each of its validation splits.

    Raises:
        Refused: no checkpoint, no split, or what `build` refuses.
    """
    if not config.data.validation:
        raise Refused("data.validation: there is nothing to evaluate on; name a dataset there")
    with joined(config):
        run, model, step, (_, validation) = restored(config)
        with jax.set_mesh(run.mesh):
            results = evaluate_splits(run, run.evaluation_step, model, validation)
        return {split: {"step": step, **result} for split, result in results.items()}


def generate(config: Config, prompt: str) -> str:
    """`prompt` and its continuation by a run's newest checkpoint, as `sample.*` says.

    Raises:
        Refused: no checkpoint, an encoder, an empty prompt, or what `build` refuses.
    """
    if not config.model.causal:
        raise Refused("model.causal = false: an encoder cannot continue a text; `jaxscale eval` measures it")
    with joined(config):
        run, model, _, (mixture, _) = restored(config)
        return complete(run, model, mixture.first, prompt)


def describe(config: Config) -> dict[str, Any]:
    """Numbers that follow from a config alone; a length in epochs is None where the dataset is not there."""
    length, phases, model = config.data.sequence_length, phases_of(config), config.model
    tokens = config.batch.global_size * length
    steps = lengths_of(config, phases, _rows_of_epoch(config)).steps
    flops = flops_per_token(model, length)
    facts: dict[str, Any] = {
        "parameters": parameter_count(model),
        "tokens_an_update": tokens,
        "updates": steps,
        "tokens": None if steps is None else tokens_at_step(phases, steps),
        "flops_a_token": flops,
        "flops_an_update": flops * tokens,
        "flops": None
        if steps is None
        else sum(
            updates * phase.global_batch * phase.sequence_length * flops_per_token(model, phase.sequence_length)
            for phase, updates in updates_of_phases(phases, steps)
        ),
        "run_directory": str(config.run_dir),
    }
    if len(phases) > 1 or len(config.data.sources) > 1:
        facts["phases"] = {
            str(number): {
                "first_step": step_at_cursor(phases, phase.first_cursor),
                "global_size": phase.global_batch,
                "sequence_length": phase.sequence_length,
                "shares": shares(config, phase),
            }
            for number, phase in enumerate(phases)
        }
    return facts


def _rows_of_epoch(config: Config) -> int | None:
    """Rows of the dataset where a length is in its epochs and it is there."""
    source, *_ = config.data.sources.values()
    if train_length(config).unit != "epochs" or TokenDataset.find(source.path, config.data.tokenizer) is None:
        return None
    return open_mixture(config.data).rows(config.data.sequence_length)


def claim_run(config: Config, stack: ExitStack) -> None:
    """Keeps the run directory for this run until `stack` ends.

    Raises:
        Refused: the directory cannot be made, or another run is using it.
    """
    try:
        lock = claim(config.run_dir / "lock")
    except OSError as error:
        raise Refused(
            f"runs_dir, name: {config.run_dir} cannot be written: {error.strerror} ({error.filename})"
        ) from error
    if lock is None:
        raise Refused(f"{config.run_dir} is in use by another run; wait for its end, or train under another name")
    stack.enter_context(lock)


@contextmanager
def joined(config: Config) -> Iterator[Processes]:
    """All processes of the run, together from start to end.

    Where one of several fails, it says why and ends at once: an ordinary exit would wait for the others, which are
    waiting for it.
    """
    processes = distributed.start(config.cluster)
    try:
        yield processes
    except StoppedEarly:
        distributed.shutdown()
        raise
    except BaseException as error:
        if processes.count == 1:
            raise
        if isinstance(error, Stop):
            print(f"jaxscale: process {processes.index}: {error}", file=sys.stderr)
            distributed.leave(error.exit_code)
        traceback.print_exc()
        distributed.leave(Fault.exit_code)
    distributed.shutdown()


def restored(config: Config) -> tuple[Run, ModelArrays, int, tuple[Mixture, dict[str, Mixture]]]:
    """A run with the model of its newest checkpoint (and no more of the state), the step of it, and its datasets."""
    saved = newest(config.run_dir)
    if saved is None:
        raise Refused(f"{config.run_dir}: holds no complete checkpoint; train it first")
    datasets = open_datasets(config, Console(quiet=True))
    mixture, _ = datasets
    timeline = make_timeline(config, phases_from(saved, config), mixture.rows(config.data.sequence_length))
    run = build(config, jax.devices(), timeline, mixture.first.mask_id)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep)
    return run, checkpoints.restore(saved.step, model_of(run.state)), saved.step, datasets


def make_sinks(run: Run, processes: Processes, console: Console, stack: ExitStack, first: int, last: int) -> list[Sink]:
    """Where metrics go: the file and the progress bar of process 0."""
    if not processes.first:
        return []
    sinks: list[Sink] = [
        MetricsFile(run.config.run_dir / "metrics.jsonl", first),
        ProgressBar(console, first, last),
    ]
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def make_hooks(
    run: Run,
    steps: Steps,
    validation: Mapping[str, Mixture],
    sinks: list[Sink],
    checkpoints: Checkpoints,
    about: Mapping[str, Any],
    first: int,
    last: int,
) -> list[Hook]:
    """The hooks of a run, in the order in which they act: a checkpoint is saved before anything that may fail."""
    config, place = run.config, run.timeline.place
    device = run.mesh.devices.flat[0]
    peak = peak_flops(device.device_kind, run.precision.compute.name)
    hooks: list[Hook] = [
        FiniteGuard(config.guard.nonfinite_updates),
        MetricsHook(
            sinks,
            wanted=every(config.metrics.every_steps, last),
            place=place,
            flops_per_token=partial(flops_per_token, config.model),
            peak_flops=None if peak is None else peak * run.mesh.devices.size,
        ),
        CheckpointHook(checkpoints, about, every(config.checkpoint.every_steps, last)),
    ]
    if validation:
        hooks.append(
            EvaluationHook(
                lambda state: evaluate_splits(run, steps.evaluate, model_of(state), validation),
                sinks,
                place,
                every(config.evaluate.every_steps, last),
            )
        )
    if config.profile.steps:
        hooks.append(ProfileHook(config.run_dir / "profile", first, config.profile.first_step, config.profile.steps))
    if config.guard.watchdog_seconds is not None:
        hooks.append(WatchdogHook(Watchdog(config.guard.watchdog_seconds)))
    return hooks
