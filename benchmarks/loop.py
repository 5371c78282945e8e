"""How much time jaxscale's loop adds to the bare compiled step: feeding, reading metrics, hooks, files, signals."""

from __future__ import annotations

import io
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks.jaxscale_step import make_config
from benchmarks.workload import PRESETS, Preset
from jaxscale.cluster import distributed
from jaxscale.config.phases import phases_of
from jaxscale.data.feed import Feed
from jaxscale.data.loader import Reading
from jaxscale.data.mixture import make_order, open_mixture
from jaxscale.data.store import TokenDataset
from jaxscale.data.tokenizer import load_tokenizer
from jaxscale.data.writer import DatasetWriter
from jaxscale.runtime.checkpoint import Checkpoints
from jaxscale.runtime.guard import StopSignal
from jaxscale.runtime.ledger import Ledger
from jaxscale.train.build import build, compile_steps, make_timeline
from jaxscale.train.loop import run_loop
from jaxscale.train.run import make_hooks, make_sinks

STEPS = 5
"""Steps of one turn of the loop, and of one turn without it."""


def measure(repeats: int, preset: Preset = PRESETS["tiny"]) -> dict[str, float]:
    """Seconds of a step with and without the loop, and what the loop adds, as a share.

    Both run the same compiled step on the same state, in turns, of which the fastest counts: on a machine that does
    other things too, a median tells of those. The loop reads a dataset on disk and has all hooks of `jaxscale train`;
    no checkpoint or evaluation falls into a turn.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        dataset = make_dataset(Path(folder) / "tokens", preset)
        config = make_config(preset, dataset.folder).model_copy(update={"runs_dir": Path(folder)})
        config.run_dir.mkdir()
        processes = distributed.start(config.cluster)
        phases, mixture = phases_of(config), open_mixture(config.data)
        run = build(config, jax.devices(), make_timeline(config, phases, None), None)
        steps = compile_steps(run, evaluates=False, initializes=True)
        sinks = make_sinks(run, processes, Console(file=io.StringIO()), stack, 0, run.timeline.steps)
        hooks = make_hooks(
            run, steps, {}, sinks, Checkpoints(Path(folder) / "checkpoints", 1), {}, 0, run.timeline.steps
        )
        stop, ledger = stack.enter_context(StopSignal()), Ledger()
        last = repeats * STEPS
        feed = Feed(
            mixture, make_order(config, mixture, phases), run.batch, Reading(), first_step=0, last_step=last + 1
        )
        batch = feed.next()[0].arrays
        state = jax.block_until_ready(steps.train(steps.initialize(), batch)[0])

        def bare(state: Any, first: int) -> Any:
            for _ in range(STEPS):
                state, _ = steps.train(state, batch)
            return state

        def with_loop(state: Any, first: int) -> Any:
            return run_loop(state, steps.train, feed, first, first + STEPS, hooks, stop.agreed, ledger.phase)[0]

        seconds: dict[Any, list[float]] = {bare: [], with_loop: []}
        for first in range(0, last, STEPS):
            for turn in seconds:
                begin = time.perf_counter()
                state = jax.block_until_ready(turn(state, first))
                seconds[turn].append((time.perf_counter() - begin) / STEPS)
        for hook in hooks:
            hook.close()

    alone, looped = min(seconds[bare]), min(seconds[with_loop])
    return {"bare": alone, "with_loop": looped, "overhead": looped / alone - 1}


def make_dataset(folder: Path, preset: Preset) -> TokenDataset:
    """A token dataset of noise."""
    tokenizer = load_tokenizer("bytes")
    random = np.random.default_rng(0)
    with DatasetWriter(folder, tokenizer, {}) as writer:
        for _ in range(4000):
            writer.add(random.integers(0, tokenizer.vocabulary_size, 1000, np.uint16), text_bytes=1000)
    return TokenDataset.open(folder)
