"""What a run costs: against hand calculation, the run that the failure rate comes from, and limits."""

from __future__ import annotations

import math
import random

import pytest

from jaxscale.hardware import known
from jaxscale.plan.money import FAILURES_A_GPU_DAY, HOST_POWER, money

DAY = 86_400


def test_by_hand() -> None:
    """16 GPUs of 700 W for two days, without failures and saves."""
    found = money(2.0, DAY, known().cluster("h100-sxm:2x8"), price=2.5, failures_a_gpu_day=0, save_seconds=0)
    assert found.days == found.days_with_failures == 2
    assert found.gpu_hours == 2 * 24 * 16
    assert found.kilowatt_hours == pytest.approx(768 * 0.7 * HOST_POWER)
    assert found.cost == 768 * 2.5
    assert (found.failures, found.ettr, found.hours_between_failures) == (0, 1, math.inf)


def test_the_run_that_the_rate_comes_from() -> None:
    """16,384 GPUs for 54 days of wall clock see 419 failures, one in about three hours (arXiv 2407.21783)."""
    cluster = known().cluster("h100-sxm:2048x8")
    once = money(1.0, DAY, cluster)
    found = money(1.0, round(54 * DAY * once.ettr), cluster)
    assert found.days_with_failures == pytest.approx(54, rel=1e-3)
    assert found.failures == pytest.approx(419, rel=1e-3)
    assert 3 < found.hours_between_failures < 3.2
    assert found.ettr > 0.9, "the paper reports more than 90 % of effective training time"


def test_the_interval_is_the_best_one() -> None:
    """Young's interval by hand, and no other interval loses less in a simulation of failures."""
    cluster, save, restart = known().cluster("h100-sxm:128x8"), 30.0, 300.0
    found = money(1.0, 30 * DAY, cluster, save_seconds=save, restart_seconds=restart, failures_a_gpu_day=0.005)
    between = DAY / (0.005 * 1024)
    assert found.checkpoint_seconds == pytest.approx(math.sqrt(2 * 30 * between))
    assert found.checkpoint_updates == round(found.checkpoint_seconds)
    # A failed stretch may also hit the save or the restart, which the formula leaves out: 1 %.
    assert simulated(found.checkpoint_seconds, save, restart, between) == pytest.approx(found.ettr, abs=0.01)
    for factor in (0.4, 2.5):
        assert simulated(found.checkpoint_seconds * factor, save, restart, between) < found.ettr - 0.005


def simulated(interval: float, save: float, restart: float, between: float) -> float:
    """Share of the wall clock that makes progress in a long run with failures at random times."""
    draw = random.Random(1)
    clock = progress = 0.0
    failure = draw.expovariate(1 / between)
    while clock < 20_000 * between:
        if failure > clock + interval + save:
            clock, progress = clock + interval + save, progress + interval
        else:
            clock = failure + restart
            failure = clock + draw.expovariate(1 / between)
    return progress / clock


def test_limits() -> None:
    """A run shorter than the interval saves once; one that cannot recover never ends; more failures never help."""
    cluster = known().cluster("tx-gain:1")
    short = money(1.0, 100, cluster)
    assert (short.checkpoint_seconds, short.checkpoint_updates) == (100, 100)
    hopeless = money(1.0, DAY, cluster, failures_a_gpu_day=1000)
    assert (hopeless.ettr, hopeless.days_with_failures) == (0, math.inf)
    rates = [0, FAILURES_A_GPU_DAY, 0.01, 0.1, 1]
    days = [money(1.0, 10 * DAY, known().cluster("h100-sxm:16x8"), failures_a_gpu_day=rate) for rate in rates]
    assert [found.days_with_failures for found in days] == sorted(found.days_with_failures for found in days)
    assert {found.days for found in days} == {10}
    assert money(5.0, DAY, cluster).cost is None
