"""benchmarks/step.py is only worth something if all contestants compute the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import handwritten, jaxscale_step
from benchmarks.step import CONTESTANTS, Racer, check_losses, racer, summary
from benchmarks.workload import PRESETS, Preset

PRESET = Preset(embed=32, layers=2, heads=2, mlp=48, vocabulary=128, sequence=24, batch=4, steps=1)


def losses(step: Callable[[], Any]) -> list[float]:
    """The losses of some steps, in which each batch is met three times."""
    return [float(step()) for _ in range(6)]


def test_handwritten_and_jaxscale_compute_the_same() -> None:
    handwritten_losses = losses(handwritten.Training(PRESET, scanned=False))
    assert handwritten_losses[-1] < handwritten_losses[1] - 0.01, "the weights are updated"
    np.testing.assert_allclose(losses(handwritten.Training(PRESET, scanned=True)), handwritten_losses, rtol=1e-5)
    np.testing.assert_allclose(losses(jaxscale_step.Training(PRESET, devices=1)), handwritten_losses, rtol=1e-5)
    np.testing.assert_allclose(losses(jaxscale_step.Training(PRESET, devices=2)), handwritten_losses, rtol=1e-5)


def test_pytorch_computes_the_same() -> None:
    pytest.importorskip("torch")
    from benchmarks import pytorch_step

    expected = losses(handwritten.Training(PRESET, scanned=False))
    np.testing.assert_allclose(losses(pytorch_step.Training(PRESET, compiled=False)), expected, rtol=1e-5)


def test_a_contestant_takes_turns_in_a_process_of_its_own() -> None:
    with racer(CONTESTANTS[0], "tiny", sys.executable) as base:
        base.turn(steps=1)
        base.turn(steps=2)
    assert base.process.returncode is not None
    assert all(seconds > 0 for seconds in base.seconds)
    (row,) = summary(PRESETS["tiny"], [base])
    assert row["slowest"] <= row["tokens_per_second"] <= row["fastest"]
    assert row["ratio"] == 1

    other = Racer("other", base.process, 0.0, [base.losses[0], *(2 * loss for loss in base.losses[1:])], {})
    with pytest.raises(SystemExit, match="other computes something else"):
        check_losses(base, other)


def test_a_contestant_that_fails_ends_the_benchmark() -> None:
    with (
        pytest.raises(SystemExit, match="hand-written: ended with exit code 2"),
        racer(CONTESTANTS[0], "huge", sys.executable),
    ):
        pass
