"""What a run costs: days, GPU-hours, energy, money, and the failures that are to be expected.

**Failures.** With f failures a GPU-day, n GPUs fail every 1 / (n f) days on average. Meta counted 419 unexpected
interruptions in 54 days of 16,384 H100s (arXiv 2407.21783, section 3.3.4), which is FAILURES_A_GPU_DAY.

**Checkpoints.** Saving costs s seconds in which nothing is trained, and a failure costs half an interval on average.
The interval that loses least is sqrt(2 s m), m being the mean time between failures (Young, 1974, doi
10.1145/361147.361115; Daly, 2006, doi 10.1016/j.future.2004.11.016).

**ETTR**, the effective training time ratio, is the share of the wall clock that makes progress (arXiv 2410.21680): the
rest goes to saving, to what is computed again, and to starting again. With a checkpoint every i seconds, of each i + s
seconds i make progress; and a failure, every m seconds of the wall clock, takes i / 2 and the restart r out of it:
(1 - (i / 2 + r) / m) / (1 + s / i), which is 0 where failures come faster than the run recovers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxscale.hardware import Cluster

DAY = 86_400.0
FAILURES_A_GPU_DAY = 419 / (54 * 16_384)
HOST_POWER = 1.5
"""Watts of hosts, network and cooling together for each watt of GPUs; assumed: a DGX H100 takes 10.2 kW for 5.6 kW of
GPUs (1.8), at a power usage effectiveness of 1.1, while GPUs in training take about three quarters of their limit."""


@dataclass(frozen=True)
class Money:
    """What a run costs."""

    days: float
    """Of training without any failure."""
    gpu_hours: float
    """The same, times GPUs."""
    kilowatt_hours: float
    """With failures, as GPUs that start again draw power too."""
    cost: float | None
    """At the given price, in its currency; with failures."""
    failures: float
    """To be expected over the run."""
    hours_between_failures: float
    checkpoint_seconds: float
    """Interval between checkpoints that loses least."""
    checkpoint_updates: int
    """The same, in updates."""
    ettr: float
    """Effective training time ratio at that interval."""
    days_with_failures: float
    """Infinite where failures come faster than the run recovers."""


def money(
    step_seconds: float,
    updates: int,
    cluster: Cluster,
    *,
    price: float | None = None,
    failures_a_gpu_day: float = FAILURES_A_GPU_DAY,
    save_seconds: float = 5.0,
    restart_seconds: float = 600.0,
) -> Money:
    """What so many updates cost on a cluster.

    Args:
        step_seconds: of an update.
        updates: of the whole run.
        cluster: where.
        price: of a GPU-hour, in any currency; None: not known.
        failures_a_gpu_day: failures that end the run, for each GPU and day.
        save_seconds: that a checkpoint keeps the training waiting.
        restart_seconds: from a failure to the first update after it.
    """
    seconds = step_seconds * updates
    between = DAY / (failures_a_gpu_day * cluster.gpus) if failures_a_gpu_day else math.inf
    interval = min(seconds, max(step_seconds, math.sqrt(2 * save_seconds * between)))
    ettr = max(0.0, 1 - (interval / 2 + restart_seconds) / between) / (1 + save_seconds / interval)
    days = seconds / DAY
    with_failures = days / ettr if ettr else math.inf
    paid_hours = with_failures * 24 * cluster.gpus
    return Money(
        days=days,
        gpu_hours=days * 24 * cluster.gpus,
        kilowatt_hours=paid_hours * cluster.gpu.power * HOST_POWER / 1000,
        cost=None if price is None else price * paid_hours,
        failures=with_failures * DAY / between if failures_a_gpu_day else 0.0,
        hours_between_failures=between / 3600,
        checkpoint_seconds=interval,
        checkpoint_updates=max(1, round(interval / step_seconds)),
        ettr=ettr,
        days_with_failures=with_failures,
    )
