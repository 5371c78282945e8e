"""How fast this machine feeds a run: batches read in several ways, and the GPUs that such a rate keeps busy."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxscale.cluster import distributed
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config
from jaxscale.data.feed import Feed
from jaxscale.data.loader import Reading
from jaxscale.data.mixture import Mixture, make_order, open_mixture
from jaxscale.data.order import Order
from jaxscale.flops import flops_per_token
from jaxscale.hardware import known
from jaxscale.train.build import Run, build, make_timeline

GOOD_MFU = 0.5
"""Share of its peak at which a GPU is taken to train: higher than most runs reach, so that it asks for many tokens."""
ENOUGH = 0.95
"""The recommended way is the most modest one that is at least this fast, over the fastest."""
MOST_BATCHES = 10_000
"""Batches that are read in one way at most."""


def bench(config: Config, seconds: float) -> dict[str, Any]:
    """Rates of several ways to read the batches of a config and send them to this process's devices.

    Args:
        config: a run whose datasets are there.
        seconds: time for each way, after its first batch.

    Returns:
        `cores`, `tokens_a_batch` (those of this process), `settings` (a list of `workers`, `read_threads`, `read_ahead`
        and `tokens_per_second`), `recommended` (one of them), and `gpus` (kind -> GPUs that the recommended rate
        feeds, None where a kind cannot compute in bfloat16).

    Raises:
        Refused: a dataset is missing, or what `build` refuses.
    """
    distributed.start(config.cluster)
    mixture, phases = open_mixture(config.data), phases_of(config)
    order = make_order(config, mixture, phases)
    timeline = make_timeline(config, phases, mixture.rows(config.data.sequence_length))
    run = build(config, jax.devices(), timeline, mixture.first.mask_id)
    measured = {reading: rate(run, mixture, order, reading, seconds) for reading in readings(cores())}
    best = recommended(measured)
    flops = flops_per_token(config.model, config.data.sequence_length)
    return {
        "cores": cores(),
        "tokens_a_batch": config.batch.global_size * config.data.sequence_length,
        "settings": [{**_keys(reading), "tokens_per_second": found} for reading, found in measured.items()],
        "recommended": {**_keys(best), "tokens_per_second": measured[best]},
        "gpus": {
            gpu.name: measured[best] * flops / (GOOD_MFU * gpu.peaks["bfloat16"]) if "bfloat16" in gpu.peaks else None
            for gpu in known().gpus.values()
        },
    }


def bench_text(facts: dict[str, Any]) -> str:
    """The facts of `bench` for people."""
    lines = [f"{facts['cores']} cores, {facts['tokens_a_batch']:,} tokens a batch, sent to the devices", ""]
    lines.append(f"{'workers':>8}{'read_threads':>14}{'read_ahead':>12}{'tokens/s':>16}")
    for setting in facts["settings"]:
        chosen = "  recommended" if setting == facts["recommended"] else ""
        columns = f"{setting['workers']:>8}{setting['read_threads']:>14}{setting['read_ahead']:>12}"
        lines.append(f"{columns}{setting['tokens_per_second']:>16,.0f}{chosen}")
    best = facts["recommended"]
    keys = " ".join(f"data.{name}={best[name]}" for name in ("workers", "read_threads", "read_ahead"))
    lines += ["", keys, "", f"GPUs that this rate feeds, each at {GOOD_MFU:.0%} of its bfloat16 peak:"]
    for kind, count in facts["gpus"].items():
        lines.append(f"  {kind:<12}{_shown(count):>12}")
    return "\n".join(lines)


def choose_reading(config: Config, run: Run, mixture: Mixture, order: Order) -> Reading:
    """How a run reads its batches: as its config says, or for `data.workers = "auto"` as measured here and now."""
    data = config.data
    if data.workers != "auto":
        return Reading(data.workers, data.read_threads, data.read_ahead)
    return recommended({reading: rate(run, mixture, order, reading, seconds=0.3) for reading in readings(cores())})


def readings(cores: int) -> Iterator[Reading]:
    """The ways that are tried: more threads, then more processes, up to the cores; and batches ahead."""
    powers = [2**k for k in range(cores.bit_length()) if 2**k <= min(cores, 16)]
    for threads, ahead in itertools.product(powers, (2, 8)):
        yield Reading(0, threads, max(ahead, threads))
    for workers in powers[1:]:
        yield Reading(workers, 1, 2 * workers)


def rate(run: Run, mixture: Mixture, order: Order, reading: Reading, seconds: float) -> float:
    """Tokens a second of this process that come to the devices when nothing else is waited for."""
    warm_up, last = 1 + 2 * reading.workers, MOST_BATCHES if order.steps is None else min(MOST_BATCHES, order.steps)
    feed = Feed(mixture, order, run.batch, reading, first_step=0, last_step=last)
    try:
        for _ in range(warm_up):
            feed.next()
        begin, tokens = time.perf_counter(), 0
        for done in range(last - warm_up):
            if done >= 2 and time.perf_counter() - begin > seconds:
                break
            batch, _ = feed.next()
            jax.block_until_ready(batch.arrays)
            tokens += len(batch.rows) * batch.arrays["tokens"].shape[-1]
        return tokens / (time.perf_counter() - begin)
    finally:
        feed.close()


def recommended(measured: dict[Reading, float]) -> Reading:
    """The first of the ways, from modest to lavish, that is about as fast as the fastest."""
    fastest = max(measured.values())
    return next(reading for reading, found in measured.items() if found >= ENOUGH * fastest)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _shown(count: float | None) -> str:
    if count is None:
        return "no bfloat16"
    return f"{count:,.0f}" if count >= 1 else "less than 1"


def _keys(reading: Reading) -> dict[str, int]:
    return {"workers": reading.workers, "read_threads": reading.threads, "read_ahead": reading.ahead}
